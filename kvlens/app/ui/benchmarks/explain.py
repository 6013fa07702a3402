"""How good the lens is, on the Benchmarks page: the share of lost answers that comes back by what is held."""

from __future__ import annotations

import streamlit as st

from kvlens.app.figures.explain import restored, table
from kvlens.app.ui.benchmarks import result_files
from kvlens.app.ui.benchmarks.benchview import where
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.widgets import error, plain


def show_explain(model: str | None) -> None:
    """The measured table of a model as a map, or how to measure it."""
    st.markdown("##### How often the lens is right")
    results, damaged = result_files.list_results("explain", model)
    if not results:
        if not damaged:
            result_files.nothing("lost answers were explained", "explain", model)
        return
    result = results[0]
    try:
        frame, about = table(result.content["lines"]), result.content["about"]
        intro = f"Model {about['model']}, prompts of {about['length']} tokens."
    except (KeyError, TypeError, AttributeError):
        error(f"The file {result.name} lacks fields this version needs; measure it again.")
        return
    if frame.empty:
        st.info(plain(f"The file {result.name} holds no lost trial."))
        return
    chart(
        restored(frame, result_files.titles_measured(about["model"], about)),
        frame,
        "kvlens-explain",
        "bench_explain",
        "Share of lost answers restored, by method and what was held",
    )
    st.caption(
        plain(
            f"{intro} Each trial is an answer that full KV gives and the method loses. The run is repeated with the "
            "first entries of the lens held (layer, KV head, span), in the order that Replay shows. Older tables use "
            f"the order of effect or regret. Shares are of {_lost(sorted(set(frame['n'])))} lost answers a row, with "
            f"95 % intervals on hover. The question was read with its context. Measured {where(about)}."
        )
    )


def _lost(n: list[int]) -> str:
    """'50', or '15 to 50'."""
    return f"{n[0]}" if len(n) == 1 else f"{n[0]} to {n[-1]}"
