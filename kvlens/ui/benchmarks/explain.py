"""How good the lens is, on the Benchmarks page: the share of lost answers that comes back by what is held."""

from __future__ import annotations

import streamlit as st

from kvlens.figures.explain import restored, table
from kvlens.ui.benchmarks.benchview import guarded_read, where
from kvlens.ui.common import data
from kvlens.ui.common.chart import chart
from kvlens.ui.common.widgets import error, plain


def show_explain() -> None:
    """The measured table as a map, or how to measure it."""
    st.markdown("##### How often the lens is right")
    found = guarded_read("explain.json")
    if found is None:
        st.info("This was not measured yet: run `kvlens bench explain`.")
        return
    try:
        frame, about = table(found["lines"]), found["about"]
        said = f"Model {about['model']}, prompts of {about['length']} tokens."
    except (KeyError, TypeError, AttributeError):
        error("The file explain.json lacks fields this version needs; measure it again with kvlens bench explain.")
        return
    if frame.empty:
        st.info("The file explain.json holds no lost trial.")
        return
    chart(
        restored(frame, data.titles()),
        frame,
        "kvlens-explain",
        "bench_explain",
        "Share of lost answers restored, by method and what was held",
    )
    st.caption(
        plain(
            f"{said} Each trial is an answer full KV gives and the method loses; layer, KV head and span are "
            f"ranked by regret, at the step "
            "of loss or added over all lost steps of the forced run, and the free run is repeated with the "
            "first of them held. Measured "
            f"{where(about)}."
        )
    )
