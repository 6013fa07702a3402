"""The section of the Heads page on many runs: which query heads read the needle, how much that varies over prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import streamlit as st

from kvlens.app.figures.heads import head_map
from kvlens.app.figures.readers import SPAN_MASS, SPREAD, TOP
from kvlens.app.ui.common import data, session
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.clicks import cell_clicked
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.widgets import plain
from kvlens.lens.spanreaders import Stability, retrieval_heads
from kvlens.store.errors import TraceError
from kvlens.text.units import counted

MOST_RUNS = 200
"""runs that are read, newest first"""
MAPS = (("mean", SPAN_MASS, "mean"), ("spread", SPREAD, "standard deviation"), ("top_share", TOP, "share"))


def over_runs(reader: TraceReader, cell: tuple[int, int]) -> None:
    """Draw the mean map over the prompts of this model's runs, its spread and the stability of ranks, when opened."""
    fold = st.expander("Retrieval heads over the runs of this model", key="heads_retrieval", on_change="rerun")
    if not fold.open:
        return
    with fold:
        runs = data.runs()
        same = runs[(runs["model"] == reader.meta.model) & (runs["status"] == "completed")]
        if len(same) > MOST_RUNS:
            st.caption(f"Over the newest {MOST_RUNS} of {len(same):,} runs.")
        uids = tuple(str(uid) for uid in same["uid"].head(MOST_RUNS))
        try:
            stability = _stability(uids, tuple(map(data.stamp, uids)))
        except ValueError:
            st.info("No run of this model has a marked needle and full attention by span.")
            return
        for place, (column, metric, how) in zip(st.columns(3, gap="small"), MAPS, strict=True):
            key = f"retrieval_{column}_{session.revision()}_{cell[0]}_{cell[1]}"
            values = stability.grid(column, reader.n_layers, reader.q_heads)
            title = f"{how} of {counted(len(stability.runs), 'prompt')}"
            with place:
                chart(
                    head_map(values, reader.kv_heads, metric, cell, title, fit=True),
                    stability.frame,
                    f"retrieval-heads-{reader.meta.model}",
                    key,
                    f"{metric.title} by layer and query head",
                    on_select=partial(cell_clicked, key),
                )
        stable = "not known from one prompt" if len(stability.runs) < 2 else f"{stability.correlation:.2f}"
        st.caption(
            plain(
                f"Full KV's mass on the needle's spans, mean over steps, n = {len(stability.runs)} prompts of "
                f"{reader.meta.model}; runs of one prompt count once. Mean rank correlation of two prompts: {stable}."
            )
        )


@st.cache_data(max_entries=8, show_spinner="Reading the runs of this model")
def _stability(uids: tuple[str, ...], changed: tuple[int, ...]) -> Stability:
    """Read the runs, again where the trace of one has changed since (`changed`): a run may be busy for a moment."""
    return retrieval_heads(one_by_one(data.runs_dir(), uids))


def one_by_one(folder: Path, uids: Sequence[str]) -> Iterator[TraceReader]:
    """Readers of the runs that can be read; each is closed when the next is asked for."""
    for uid in uids:
        with suppress(TraceError), TraceReader.open(folder, uid) as reader:
            yield reader
