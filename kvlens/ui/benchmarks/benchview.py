"""The Benchmarks page: measured tables that came with this copy of kvlens, or that the user measured. Nothing here is
modelled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from kvlens import REPOSITORY
from kvlens.figures.quality import AXES, COSTS, quality, table
from kvlens.ui.common import data
from kvlens.ui.common.chart import chart
from kvlens.ui.common.parts import download
from kvlens.ui.common.widgets import error, plain

SHIPPED = REPOSITORY / "benchmarks" / "results"
VERDICTS = {True: "holds", False: "does not hold", None: "cannot be decided"}


def folder() -> Path:
    """Where results are read: $KVLENS_RESULTS, else the ones in the repository."""
    return Path(os.environ.get("KVLENS_RESULTS") or SHIPPED)


def read(name: str) -> dict[str, Any] | None:
    """One result file; None when there is none. Raises ValueError with one sentence when it is not readable."""
    path = folder() / name
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"the result file '{name}' is not JSON; measure it again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"the result file '{name}' does not hold a result; measure it again.")
    return found


def where(about: dict[str, Any]) -> str:
    """'2026-01-01, AMD EPYC, 2 cores, torch 2.13.0': on what a figure was measured."""
    machine = about.get("machine", {})
    parts = [
        about.get("date"),
        machine.get("processor"),
        f"{machine.get('cores')} cores" if machine.get("cores") else None,
    ]
    parts.append(f"torch {about['torch']}" if about.get("torch") else None)
    return ", ".join(str(part) for part in parts if part)


def show_quality() -> None:
    """Exact match of every method against what it cost, and the table behind it."""
    st.markdown("##### Quality at equal budgets")
    found = guarded_read("quality.json")
    if found is None:
        st.info("No quality table was measured yet: run `kvlens bench quality`.")
        return
    try:
        frame, about = table(found["lines"]), found["about"]
        request = about["request"]
        tasks, length = request["tasks"], request["length"]
        counts = f"{about['trials']} of {about['planned']} trials"
    except (KeyError, TypeError):
        error("The file quality.json lacks fields this version needs; measure it again with kvlens bench quality.")
        return
    axis = st.segmented_control(
        "Against",
        COSTS,
        default="resident_share",
        format_func=lambda a: AXES[a][0].partition(":")[0],
        key="bench_axis",
        required=True,
    )
    figure = quality(frame, str(axis), data.titles())
    chart(figure, frame, "kvlens-quality", "bench_quality", "Exact match by method, task and budget")
    st.caption(
        plain(
            f"Model {request['model']}, prompts of {length} tokens, tasks {', '.join(tasks)}; {counts}; bars "
            f"are 95 % Wilson intervals. "
            "Budgets are shares of full KV held on the device; methods that keep every token there are "
            "held to the same share of "
            "attended tokens instead. Slot tables, a method's index and generated tokens count as well, so "
            "shares can pass 100 %. "
            f"Measured {where(about)}."
        )
    )
    show = frame.assign(
        method=[data.titles().get(name, name) for name in frame["method"]],
        budget=frame["budget"].replace("", "no limit"),
    )
    st.dataframe(show, hide_index=True, column_config=columns(), height=320)
    download(frame, "kvlens-quality")


def columns() -> dict[str, Any]:
    """How the columns of a summary are shown."""
    number = st.column_config.NumberColumn
    return {
        "exact": number("exact match", format="%.2f"),
        "low": number("95 % low", format="%.2f"),
        "high": number("95 % high", format="%.2f"),
        "score": number("score", format="%.2f", help="for lists the share of right entries, else exact match"),
        "coverage": number("coverage", format="%.2f"),
        "attended_tokens": number("attended tokens", format="%.0f"),
        "attended_share": number("attended share", format="percent"),
        "resident_share": number("resident share", format="percent"),
        "smallest_feasible": number("smallest feasible", format="percent"),
        "rule": "held to",
        "n": "prompts",
        "h2d_bytes_per_step": number("to device per step (bytes)", format="compact"),
        "d2h_bytes_per_step": number("to host per step (bytes)", format="compact"),
    }


def show_claims() -> None:
    """The papers' qualitative claims and whether they hold on the model that was measured."""
    st.markdown("##### What the papers claim, checked")
    found = guarded_read("claims.json")
    if found is None:
        st.info("No claims were checked yet: run `kvlens bench claims --out benchmarks/results/claims.json`.")
        return
    try:
        frame, about = _claims(found)
    except (KeyError, TypeError, AttributeError):
        error("The file claims.json lacks fields this version needs; measure it again with kvlens bench claims.")
        return
    if frame.empty:
        st.info("The file claims.json holds no claims.")
        return
    counts = frame["here"].value_counts()
    wide = st.column_config.TextColumn(width="large")
    st.dataframe(
        frame,
        hide_index=True,
        row_height=88,
        height=420,
        column_config={"claim": wide, "measured": wide, "reason": wide},
    )
    said = ", ".join(
        f"{counts.get(word, 0)} {verb}"
        for word, verb in (
            ("holds", "hold"),
            ("does not hold", "do not hold"),
            ("cannot be decided", "cannot be decided"),
        )
    )
    st.caption(
        plain(
            f"Of {len(frame)} claims {said} on the model {about.get('model')}, {about.get('prompts')} prompts "
            f"per point; a claim that "
            f"does not hold is left as it was found. Measured {where(about)}."
        )
    )
    download(frame, "kvlens-claims")


def _claims(found: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """One row per claim, and on what they were measured (machine and date of the first method's, all prompt counts)."""
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
    counts = sorted({int(about["prompts"]) for about in abouts})
    first: dict[str, Any] = abouts[0] if abouts else {}
    return pd.DataFrame(rows), first | {"prompts": " or ".join(map(str, counts))}


def guarded_read(name: str) -> dict[str, Any] | None:
    """As `read`, the error shown on the page."""
    try:
        return read(name)
    except ValueError as problem:
        error(f"{str(problem)[0].upper()}{str(problem)[1:]}")
        return None
