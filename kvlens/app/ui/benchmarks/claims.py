"""The papers' claims on the Benchmarks page: a row per claim, and of the one that is selected all that was measured."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.ui.benchmarks import measured
from kvlens.app.ui.benchmarks.benchview import where
from kvlens.app.ui.common import data
from kvlens.app.ui.common.parts import download
from kvlens.app.ui.common.widgets import error, plain
from kvlens.lab.claims.page import VERDICTS
from kvlens.text.units import counted

PLURAL = {"holds": "hold", "does not hold": "do not hold", "cannot be decided": "cannot be decided"}
ALL = "all papers"
WIDTHS = {"method": 140, "where": 290, "claim": 740, "here": 130}
"""what the list shows of a claim, and how wide (pixels); the rest stands below it"""


def show_claims(model: str | None) -> None:
    """The papers' qualitative claims and whether they hold on the model that was measured."""
    st.markdown("##### What the papers claim, checked")
    found, damaged = measured.of("claims", model)
    if not found:
        if not damaged:
            measured.nothing("claims were checked", "claims", model)
        return
    result = found[0]
    try:
        frame, about = _claims(result.content)
    except (KeyError, TypeError, AttributeError):
        error(f"The file {result.name} lacks fields this version needs; measure it again with kvlens bench claims.")
        return
    if frame.empty:
        st.info(plain(f"The file {result.name} holds no claims."))
        return
    counts = frame["here"].value_counts()
    said = ", ".join(f"{counts.get(verdict, 0)} {verb}" for verdict, verb in PLURAL.items())
    shown, chosen = _chosen(frame, model)
    event = st.dataframe(
        shown[list(WIDTHS)],
        hide_index=True,
        height=min(40 + 35 * len(shown), 390),
        key=f"claims_{model}_{chosen}",  # what is selected is known by its row
        on_select="rerun",
        selection_mode="single-row",
        column_config={name: st.column_config.TextColumn(width=width) for name, width in WIDTHS.items()},
    )
    rows = event["selection"]["rows"]
    _one(shown.iloc[int(rows[0]) if rows and rows[0] < len(shown) else 0], not rows)
    st.caption(
        plain(
            f"Of {counted(len(frame), 'claim')} of {counted(frame['method'].nunique(), 'paper')} {said} on the model "
            f"{about.get('model')}; how many prompts stand behind one is said with it. A claim that does not hold is "
            f"left as it was found. Measured {where(about)}."
        )
    )
    download(frame, "kvlens-claims")


def _chosen(frame: pd.DataFrame, model: str | None) -> tuple[pd.DataFrame, str]:
    """The claims of the method and with the verdicts that are wanted, and a word for what was wanted."""
    left, right = st.columns([1, 2], vertical_alignment="bottom")
    method = left.selectbox("Claims of", [ALL, *dict.fromkeys(frame["method"])], key=f"claims_of_{model}")
    of = frame if method == ALL else frame[frame["method"] == method]
    counts = of["here"].value_counts()
    wanted = right.pills(
        "Claims that",
        [verdict for verdict in PLURAL if verdict in counts],
        selection_mode="multi",
        format_func=lambda verdict: f"{PLURAL[verdict]} ({counts[verdict]})",
        key=f"claims_here_{model}" + ("" if method == ALL else f"_{method}"),
        help="None chosen: all.",
    )
    shown = of[of["here"].isin(wanted)] if wanted else of
    return shown.reset_index(drop=True), "_".join((method, *wanted))


def _one(claim: pd.Series[Any], first: bool) -> None:
    """All that was measured of a claim."""
    with st.container(border=True):
        st.text(f"{claim['where']}: {claim['claim']}")
        st.text(f"Here it {claim['here']}: {claim['measured']}")
        if claim["reason"]:
            st.text(f"Why: {claim['reason']}")
        if first:
            st.caption("The first of the list; select another one.")


def _claims(found: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """One row per claim, and on what they were measured (machine of the first method's, all dates)."""
    rows = [
        {
            "method": data.titles().get(name, name),
            "where": claim["source"],
            "claim": claim["says"],
            "here": VERDICTS[claim["holds"]],
            "measured": claim["measured"],
            "reason": claim["reason"],
        }
        for name, part in found["methods"].items()
        for claim in part["claims"]
    ]
    abouts = [part["about"] for part in found["methods"].values()]
    dates = sorted({str(about["date"]) for about in abouts})
    first: dict[str, Any] = abouts[0] if abouts else {}
    return pd.DataFrame(rows), first | {"date": ", ".join(dates)}
