"""SeKV on the Method page: where it zooms, how its spans lie in host memory, how it ranked them, what moved."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.methods import sekv as figures
from kvlens.app.figures.ranking import ranking
from kvlens.app.methods import sekv_table
from kvlens.app.ui.common import parts, sentences
from kvlens.app.ui.common.ranking import heading, ranked
from kvlens.store.reader import TraceReader
from kvlens.text.units import si_bytes


def show(reader: TraceReader) -> None:
    """All sections, top to bottom."""
    whole = _whole(reader)
    if whole:
        names = ", ".join(f"L{layer} KV{head}" for layer, head in sorted(whole))
        count = reader.n_layers * reader.kv_heads
        st.info(
            f"{len(whole)} of {count} KV heads keep every token on the device and attend all of them: {names}. They "
            "have no summaries and nothing to zoom into: no zoom rate below, no spans in host memory, no scores."
        )
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        parts.head_map(reader, "zoom_rate", "Where it zooms")
        if trained(reader):
            st.caption("The paper's Fig. 5 shows this map averaged over a test set; here it is one run.")
        else:
            st.caption("This map is no counterpart of the paper's Fig. 5: the thresholds of this run were not trained.")
    with right:
        _zoom_over_steps(reader)
    _spans(reader)
    _ranking(reader)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        parts.bytes_by_cause(reader)
    with right:
        parts.times(reader)


def trained(reader: TraceReader) -> bool:
    """Return True if training set the thresholds of the run: its router is trained and no parameter replaces tau."""
    config = reader.meta.config
    tau = config.get("tau", -1.0)
    return config.get("router") == "trained" and isinstance(tau, int | float) and tau < 0


def _zoom_over_steps(reader: TraceReader) -> None:
    st.markdown("##### When it zooms")
    cube = reader.head_cube("zoom_rate")
    if not np.isfinite(cube).any():
        st.info("The zoom rate was not recorded per step in this run.")
        return
    step, layer, head = parts.selected(reader)
    parts.draw(
        reader,
        figures.zoom_over_steps(cube, reader.q_heads // reader.kv_heads, (layer, head), step),
        key="sekv_zoom_steps",
        alt="Zoom rate by query head over decode steps",
    )
    zooming = np.isfinite(cube).any(0)
    ordered = np.sort(np.nanmean(cube[:, zooming], axis=0))[::-1]
    top = max(1, round(ordered.size / 10))
    share = (
        f"{ordered[:top].sum() / ordered.sum():.0%} of all expansions come from"
        if ordered.sum() > 0
        else "nothing is zoomed into by"
    )
    st.caption(f"Mean zoom rate {ordered.mean():.3f}; {share} the {top} of {ordered.size} query heads that zoom most.")


def _spans(reader: TraceReader) -> None:
    st.markdown("##### Spans in host memory")
    frame, table = sekv_table.stored_spans(reader, reader.uid, reader.stamp)
    if frame.empty:
        st.info("No span went to host memory in this run.")
        return
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        _ranks(reader, frame, table)
        _key_space(reader, table)
    with right:
        _bytes(reader, frame, table)
        _errors(reader, table)
    with st.expander("Table of spans"):
        st.dataframe(
            table, hide_index=True, width="stretch", height=260, column_config=sekv_table.headings(table.columns)
        )
        st.caption(
            "Per span over the KV heads of all layers: sums of bytes, mean, smallest and largest rank and error."
        )
    parts.download(table, f"{reader.uid}-sekv-spans", "Download spans as CSV")


def _ranks(reader: TraceReader, frame: pd.DataFrame, table: pd.DataFrame) -> None:
    keys, values = (frame[name].to_numpy(np.float64) for name in ("rank_k", "rank_v"))
    if not (np.isfinite(keys).any() or np.isfinite(values).any()):
        st.info(sentences.NO_RANKS)
        return
    most = reader.meta.config.get("max_rank")
    histogram = figures.rank_histogram(keys, values, None if most is None else int(most))
    parts.draw(reader, histogram, key="sekv_ranks", alt="Histogram of ranks")
    parts.draw(
        reader,
        figures.per_span(
            table, {"keys": "rank_k", "values": "rank_v"}, "Rank by span, mean and range over KV heads", "components"
        ),
        key="sekv_rank_by_span",
        alt="Rank of keys and values by span",
        data=sekv_table.columns_of(table, "rank_k", "rank_v"),
    )
    recorded = frame["form"].eq("raw") & frame["rank_k"].notna()
    also = " Spans stored raw count too: factors of that rank would have been larger." if recorded.any() else ""
    st.caption(
        f"Components that the gates keep (eq. 7); the paper shows no ranks.{also} Mean: "
        f"keys {np.nanmean(keys):.1f}, values {np.nanmean(values):.1f}."
    )


def _errors(reader: TraceReader, table: pd.DataFrame) -> None:
    if not table[["err_k", "err_v"]].notna().any(axis=None):
        st.info(sentences.NO_FACTORS)
        return
    parts.draw(
        reader,
        figures.per_span(
            table, {"keys": "err_k", "values": "err_v"}, "Error of rebuilt tokens by span", "relative Frobenius error"
        ),
        key="sekv_errors",
        alt="Error of rebuilt tokens by span",
        data=sekv_table.columns_of(table, "err_k", "err_v"),
    )
    st.caption(
        "Mean and range over the KV heads that store a span as factors. A span that every KV head stores raw has no "
        "error, so nothing is drawn there. The paper's eq. 14 adds up the squares of these errors without dividing by "
        "the span's norm. The paper shows no values."
    )


def _bytes(reader: TraceReader, frame: pd.DataFrame, table: pd.DataFrame) -> None:
    sizes = table[["span", "tok_start", "tokens", "factor_bytes", "raw_form_bytes", "exact_bytes"]]
    parts.draw(reader, figures.span_bytes(table), key="sekv_bytes", alt="Bytes of spans in host memory", data=sizes)
    stored, exact = float(frame["cold_bytes"].sum()), float(frame["exact_bytes"].sum())
    raw = frame["form"].eq("raw")
    stored_raw = f"{raw.mean():.0%} of {len(frame)} (span, layer, KV head) are stored raw."
    if not exact > 0:
        st.caption(
            f"{si_bytes(stored)} in host memory. The size of exact keys and values was not recorded. {stored_raw}"
        )
        return
    parted = ""
    if not raw.all():
        share = frame.loc[~raw, "cold_bytes"].sum() / frame.loc[~raw, "exact_bytes"].sum()
        parted = f"; those stored as factors take {share:.2f} of theirs"
    st.caption(
        f"Eq. 18-19 of the paper. {si_bytes(stored)} in host memory for {si_bytes(exact)} of exact keys and values "
        f"({stored / exact:.2f}){parted}. {stored_raw}"
    )


def _key_space(reader: TraceReader, table: pd.DataFrame) -> None:
    if not table["err_k_pre_rope"].notna().any():
        return
    parts.draw(
        reader,
        figures.per_span(
            table,
            {"before the rotary embedding": "err_k_pre_rope", "after": "err_k_post_rope"},
            "Keys: best error with the stored rank, by key space",
            "relative Frobenius error",
        ),
        key="sekv_key_space",
        alt="Error of the keys before and after the rotary embedding",
        data=sekv_table.columns_of(table, "err_k_pre_rope", "err_k_post_rope"),
    )
    st.caption(
        "What the same number of components leaves of the keys before and after their rotary embedding, gates "
        "aside. Gates would "
        f"keep {table['rank_k'].mean():.1f} components before and {table['rank_k_post_rope'].mean():.1f} "
        f"after. Ours: the paper "
        "does not say in which space it decomposes."
    )


def _ranking(reader: TraceReader) -> None:
    step, layer, kv_head = heading(reader)
    group = reader.q_heads // reader.kv_heads
    frame = ranked(reader, step, layer, kv_head)
    if frame.empty:
        is_whole = (layer, kv_head) in _whole(reader)
        st.info(f"L{layer} KV{kv_head} keeps every token: it ranks no spans." if is_whole else sentences.NO_SPAN_SCORES)
        return
    logits = _thresholds(reader, layer)[kv_head * group : (kv_head + 1) * group]
    lines = {f"Q{kv_head * group + i}": float(value) for i, value in enumerate(logits) if np.isfinite(value)}
    label = f"L{layer} KV{kv_head} at step {step}"
    figure = ranking(
        frame,
        label,
        chosen_label="wanted in the group",
        unchosen_label="left as a summary by all",
        unit="score (before the sigmoid)",
        lines=lines,
    )
    parts.draw(reader, figure, key="sekv_ranking", alt=f"Scores of spans, {label}", data=frame)
    count = frame.attrs["candidates"]
    st.caption(
        f"Eq. 5 without its sigmoid, the largest over the group's query heads; {len(frame)} of {count} "
        f"candidates are logged. "
        "Dotted: logit(τ) of each query head of the group, by which it zooms into a span on its own score. The "
        "paper shows no scores." + ("" if lines else " Thresholds were not recorded.")
    )


def _whole(reader: TraceReader) -> set[tuple[int, int]]:
    """(layer, KV head) that keep every token."""
    rows = reader.journal("whole")
    layer_rows = zip(rows["layer"], rows["values"], strict=True)
    return {(int(layer), head) for layer, values in layer_rows for head, is_whole in enumerate(values) if is_whole}


def _thresholds(reader: TraceReader, layer: int) -> np.ndarray:
    """logit(tau) [Hq] of a layer; empty when not recorded."""
    frame = reader.journal("logit_tau")
    rows = frame.loc[frame["layer"] == layer, "values"]
    return np.asarray(rows.iloc[0], np.float64) if len(rows) else np.empty(0)
