"""Below the grids of a sweep: exact match against what it costs."""

from __future__ import annotations

import re
from functools import partial

import pandas as pd
import streamlit as st

from kvlens.app.figures.quality import AXES, COSTS, quality
from kvlens.app.ui.benchmarks import result_files
from kvlens.app.ui.benchmarks.griddata import Suite, lines
from kvlens.app.ui.common.chart import chart

ASKED = ("budget_share", "length")
"""axes that say what was asked for; the others, what it came to"""


def show_against(suite: Suite, task: str, name: str) -> None:
    """Draw exact match against what was asked for and what it cost. name: stem of downloaded files."""
    st.markdown("##### Exact match against what it costs")
    frame = lines(suite, task, ("length",))
    start, last = ASKED
    rows = () if frame.loc[frame["budget"] != "", "budget"].nunique() == 1 else (start,)
    axes = (*rows, *(cost for cost in COSTS if cost in frame and frame[cost].notna().any()), last)
    if st.session_state.get("bench_against") not in axes:
        st.session_state.pop("bench_against", None)
    axis = str(
        st.segmented_control(
            "Against",
            axes,
            default=axes[0],
            format_func=lambda name: re.split(r"[,:(]", AXES[name][0])[0].strip(),
            key="bench_against",
            required=True,
            persist_state="session",
        )
    )
    if axis == "length":
        limited = [budget for budget in dict.fromkeys(frame["budget"]) if budget]
        free = frame[frame["budget"] == ""]
        frame = pd.concat([frame[frame["budget"] != ""], *(free.assign(panel=budget) for budget in limited)])
        frame["panel"] = frame["panel"].fillna(frame["budget"]) if "panel" in frame else frame["budget"]
        panel, names = "panel", {budget: f"budget {budget}" for budget in limited}
    else:
        panel, names = "length", {length: f"{length:,} tokens" for length in frame["length"].dropna().unique()}
    if frame.empty or frame["exact"].isna().all():
        st.info("No trial of this task has been finished.")
        return
    chart(
        quality(frame, axis, result_files.titles_measured(suite.model, suite.about), panel, names),
        partial(pd.DataFrame, frame),
        f"{name}-by-{axis}",
        f"bench_lines_{axis}",
        f"{task}: exact match against {AXES[axis][0]}",
    )
    st.caption(
        "Over all depths; bars are 95 % Wilson intervals. A method whose prompts were all infeasible has no point."
    )
