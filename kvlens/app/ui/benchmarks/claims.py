"""The papers' claims on the Benchmarks page: a row per claim, and of the one that is selected all that was measured."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.ui.benchmarks import result_files
from kvlens.app.ui.benchmarks.benchview import where
from kvlens.app.ui.common.parts import download
from kvlens.app.ui.common.widgets import error, plain
from kvlens.lab.claims.page import VERDICTS, heading, verdict_words
from kvlens.text.units import counted

PLURAL = {"holds": "hold", "does not hold": "do not hold", "is not decided": "are not decided"}
ALL = "all papers"
WIDTHS = {"method": 140, "where": 290, "claim": 740, "here": 130}
"""what the list shows of a claim, and how wide (pixels); the rest stands below it"""


def show_claims(model: str | None) -> None:
    """The papers' qualitative claims and whether they hold on the model that was measured."""
    st.markdown("##### What the papers claim, checked")
    results, damaged = result_files.list_results("claims", model)
    if not results:
        if not damaged:
            result_files.nothing("claims were checked", "claims", model)
        return
    result = results[0]
    try:
        frame, measured = _claims(result.content, str(model))
    except (KeyError, TypeError, AttributeError):
        error(f"The file {result.name} lacks fields this version needs; measure it again.")
        return
    if frame.empty:
        st.info(plain(f"The file {result.name} holds no claims."))
        return
    counts = frame["here"].value_counts()
    tally = ", ".join(f"{counts.get(verdict, 0)} {verb}" for verdict, verb in PLURAL.items())
    shown, choice = _choose_claims(frame, model)
    event = st.dataframe(
        shown[list(WIDTHS)],
        hide_index=True,
        height=min(40 + 35 * len(shown), 390),
        key=f"claims_{model}_{choice}",  # what is selected is known by its row
        on_select="rerun",
        selection_mode="single-row",
        column_config={name: st.column_config.TextColumn(width=width) for name, width in WIDTHS.items()},
    )
    rows = event["selection"]["rows"]
    _draw_claim(shown.iloc[int(rows[0]) if rows and rows[0] < len(shown) else 0], not rows)
    st.caption(
        plain(
            f"Of {counted(len(frame), 'claim')} of {counted(frame['method'].nunique(), 'paper')} {tally} on the model "
            f"{model}. Each claim shows its number of prompts. Measured {measured}."
        )
    )
    download(frame, "kvlens-claims")


def _choose_claims(frame: pd.DataFrame, model: str | None) -> tuple[pd.DataFrame, str]:
    """The claims of the method and with the verdicts that are wanted, and a word for what was wanted."""
    left_column, right = st.columns([1, 2], vertical_alignment="bottom")
    method = left_column.selectbox("Claims of", [ALL, *dict.fromkeys(frame["method"])], key=f"claims_of_{model}")
    method_rows = frame if method == ALL else frame[frame["method"] == method]
    counts = method_rows["here"].value_counts()
    target = right.pills(
        "Claims that",
        [verdict for verdict in PLURAL if verdict in counts],
        selection_mode="multi",
        format_func=lambda verdict: f"{PLURAL[verdict]} ({counts[verdict]})",
        key=f"claims_here_{model}" + ("" if method == ALL else f"_{method}"),
        help="None chosen: all.",
    )
    shown = method_rows[method_rows["here"].isin(target)] if target else method_rows
    return shown.reset_index(drop=True), "_".join((method, *target))


def _draw_claim(claim: pd.Series[Any], is_first: bool) -> None:
    """All that was measured of a claim."""
    with st.container(border=True):
        st.text(f"{claim['where']}: {claim['claim']}")
        st.text(f"Here it {claim['verdict']}. {claim['measured']}")
        if claim["reason"]:
            st.text(f"Why: {claim['reason']}")
        if is_first:
            st.caption("The first of the list; select another one.")


def _claims(content: dict[str, Any], model: str) -> tuple[pd.DataFrame, str]:
    """One row per claim, and when and on which machines they were measured."""
    rows = [
        {
            "method": heading(name, model),
            "where": claim["source"],
            "claim": claim["says"],
            "here": VERDICTS[claim["holds"]],
            "verdict": verdict_words(claim),
            "measured": claim["measured"],
            "reason": claim["reason"],
        }
        for name, part in content["methods"].items()
        for claim in part["claims"]
    ]
    dates: dict[str, set[str]] = {}
    for part in content["methods"].values():
        about = part["about"]
        dates.setdefault(where(about | {"date": None}), set()).add(str(about["date"]))
    measured = (f"{', '.join(sorted(days))}: {machine}" for machine, days in sorted(dates.items()))
    return pd.DataFrame(rows), "; ".join(measured)
