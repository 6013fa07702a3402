"""FreeKV's view: query similarity, corrections, hits and misses, bytes that came ahead and those that were blocking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.methods import freekv as figures
from kvlens.app.ui.common import parts
from kvlens.app.ui.common.summaries import reduce_steps
from kvlens.store.reader import TraceReader
from kvlens.text.units import si_bytes


@dataclass(frozen=True)
class Run:
    """What the figures draw, read once. Cubes are [steps, layers, KV heads], NaN = not recorded."""

    similarity: np.ndarray
    corrected: np.ndarray
    hits: np.ndarray
    misses: np.ndarray
    moved: np.ndarray
    """bytes to the device"""
    blocking: np.ndarray
    """of them, bytes of blocking copies"""
    tau: float | None
    recall: str
    selected: tuple[int, int]
    """(layer, KV head) of the selection that all pages share"""

    @classmethod
    def read(cls, reader: TraceReader) -> Run:
        group = reader.q_heads // reader.kv_heads
        _, layer, head = parts.selected(reader)
        config = reader.meta.config
        names = ("similarity", "n_reused", "n_recalled", "h2d_bytes", "blocking_bytes")
        similarity, hits, misses, moved, blocking = (reader.kv_cube(name) for name in names)
        corrected = reader.head_cube("corrected")[:, :, ::group]
        tau = config.get("tau")
        return cls(
            similarity,
            corrected,
            hits,
            misses,
            moved,
            blocking,
            None if tau is None else float(tau),
            str(config.get("recall", "misses")),
            (layer, head // group),
        )


def show(reader: TraceReader) -> None:
    """Summary in words, then similarity, corrections, pages and costs."""
    run = Run.read(reader)
    if not np.isfinite(run.misses).any():
        st.info("This run keeps whole-run statistics only, so what FreeKV decided at each step was not recorded.")
        parts.bytes_by_cause(reader)
        return
    if not (run.hits + run.misses > 0).any():
        st.info(
            "All tokens stayed on the device, so no page was selected, recalled or corrected. Ask for a "
            "smaller budget, or set `tokens`."
        )
        parts.head_map(reader, "qcos", "Query similarity by query head")
        return
    st.text(in_words(run))
    _similarity(reader, run)
    _corrections(reader, run)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        _pages(reader, run)
    with right:
        _reuse(reader, run)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        parts.bytes_by_cause(reader)
    with right:
        parts.times(reader)
        st.caption(
            "Waiting includes a copy's time in the queue and the conversion of a page into its slots (layout "
            "conversion, sec. 4.2). Moving includes neither."
        )


def in_words(run: Run) -> str:
    """The run in two sentences."""
    decided = np.isfinite(run.corrected)
    hits, misses = np.nansum(run.hits), np.nansum(run.misses)
    waited, moved = np.nansum(run.blocking), np.nansum(run.moved)
    first_wait = np.nansum(run.blocking[:1])
    text = "One decode step: nothing was speculated yet. "
    if decided.any():
        rate, mean = float(run.corrected[decided].mean()), float(np.nanmean(run.similarity))
        cases = int(decided.sum())
        threshold = "not recorded" if run.tau is None else f"{run.tau:g}"
        text = (
            f"Correction rate {rate:.3f} of {cases:,} decisions (steps 1 on, layers, KV heads) at τ "
            f"{threshold}; mean query "
            f"similarity {mean:.3f}. "
        )
    came = (
        f"{si_bytes(moved - waited)} came speculatively, {si_bytes(waited)} were blocking, "
        f"{si_bytes(first_wait)} of them at step 0."
    )
    return f"{text}Of {hits + misses:,.0f} selected pages {hits / (hits + misses):.1%} were on the device; {came}"


def _by_head(reader: TraceReader, values: np.ndarray, name: str) -> pd.DataFrame:
    layers, heads = np.indices(values.shape)
    return pd.DataFrame({"layer": layers.ravel(), "kv_head": heads.ravel(), name: values.ravel()})


def _similarity(reader: TraceReader, run: Run) -> None:
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        parts.head_map(reader, "qcos", "Query similarity by query head")
        st.caption(
            "C_i of sec. 3.1, of every layer, whether or not FreeKV selects there; the paper's like is Fig. 3a "
            "and Figs. 10-14."
        )
    with right:
        st.markdown("##### Query similarity by KV head")
        if not np.isfinite(run.similarity).any():
            st.info("Not recorded: there is no step with a step before it.")
            return
        values = reduce_steps(run.similarity, "mean")
        figure = figures.kv_map(values, "Query similarity of the group, mean over steps", "cosine", run.selected)
        table = _by_head(reader, values, "similarity_mean")
        parts.draw(reader, figure, key="freekv_similarity_map", alt="Query similarity by layer and KV head", data=table)
        st.caption(
            "FreeKV compares this figure with τ (sec. 3.3): C_i, pooled over the query heads of a KV head. “n/r”: "
            "FreeKV does not select in this layer (dense_layers). Colours span the recorded values."
        )
    figure = figures.similarity_timeline(run.similarity, run.tau, run.selected)
    parts.draw(reader, figure, key="freekv_similarity_time", alt="Query similarity per decode step")
    st.caption(
        "Steps below τ are corrected. Step 0 has no step before it. Fig. 3c of the paper is the same kind of chart."
    )


def _corrections(reader: TraceReader, run: Run) -> None:
    st.markdown("##### Corrections")
    if not np.isfinite(run.corrected).any():
        st.info("Not recorded: there is no step with a step before it.")
        return
    left_column, right = st.columns([0.4, 0.6], gap="medium")
    values = reduce_steps(run.corrected, "mean")
    with left_column:
        figure = figures.kv_map(values, "Correction rate, share of steps", "share", run.selected, (0.0, 1.0))
        table = _by_head(reader, values, "correction_rate")
        parts.draw(reader, figure, key="freekv_correction_map", alt="Correction rate by layer and KV head", data=table)
    with right:
        figure = figures.correction_timeline(run.corrected)
        parts.draw(reader, figure, key="freekv_correction_time", alt="Corrections per decode step and layer")
    st.caption(
        "A corrected KV head selects and recalls before its attention, which waits (sec. 3.3). The rate is the "
        "one of Table 9, its "
        "spread over layers that of Figs. 15-19. Step 0 blocks for all heads and counts as no correction."
    )


def _pages(reader: TraceReader, run: Run) -> None:
    st.markdown("##### Hits and misses")
    waited = run.blocking > 0
    hits = np.nansum(run.hits, (1, 2))
    blocking = np.nansum(np.where(waited, run.misses, 0), (1, 2))
    background = np.nansum(np.where(waited, 0, run.misses), (1, 2))
    steps = pd.DataFrame(
        {"step": np.arange(len(hits)), "hits": hits, "misses_blocking": blocking, "misses_background": background}
    )
    figure = figures.pages(hits, blocking, background)
    parts.draw(reader, figure, key="freekv_pages", alt="Hits and misses per decode step", data=steps)
    st.caption(
        "A hit is a selected page that the device still holds. With recall=misses (sec. 4.1, the cache of "
        "selected pages) only "
        "misses move; with recall=all every selected page does, and counts as a miss."
    )


def _reuse(reader: TraceReader, run: Run) -> None:
    st.markdown("##### Does similarity tell")
    if run.recall == "all" or not np.isfinite(run.similarity).any():
        st.info(
            "Not shown: without reuse of pages (recall=all), or with one step only, the trace does not tell "
            "which pages stayed."
        )
        return
    figure = figures.reuse_by_similarity(run.similarity, run.hits, run.misses, run.tau)
    parts.draw(
        reader, figure, key="freekv_reuse", alt="Share of pages kept from the last selection by query similarity"
    )
    st.caption(
        "Speculation assumes that near queries select the same pages (sec. 3.2). Left of τ the step waited for "
        "the new pages, right "
        "of it it read the old ones. The paper has no such figure."
    )
