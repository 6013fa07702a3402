"""SentKVCompress on the Method page: where the text was cut and why, how much was reused, and what truncation cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.methods import sentkv as figures
from kvlens.app.ui.common import parts, sentences
from kvlens.app.ui.common.widgets import plain
from kvlens.spans.sentences import cut_by
from kvlens.store.reader import TraceReader
from kvlens.text.passages import passage
from kvlens.text.units import si_bytes


def show(reader: TraceReader) -> None:
    """All sections, top to bottom."""
    _chunks(reader)
    reuse = Reuse(reader)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        _over_steps(reader, reuse)
    with right:
        _by_head(reader, reuse)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        _truncation(reader, reuse)
    with right:
        _attended(reader)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        parts.bytes_by_cause(reader)
    with right:
        parts.times(reader)


class Reuse:
    """Cubes [steps, L, H_kv] of a run, NaN = not recorded or nothing wanted: shares of the wanted tokens and bytes to
    the device."""

    def __init__(self, reader: TraceReader) -> None:
        recalled, reused = reader.kv_cube("recalled_tokens"), reader.kv_cube("reused_tokens")
        requested = np.where(recalled + reused > 0, recalled + reused, np.nan)
        per_token = int(reader.meta.token_bytes or 0) / (reader.n_layers * reader.kv_heads)
        self.moved = reader.kv_cube("h2d_bytes")
        ideal = reader.kv_cube("ideal_bytes")
        self.truncated = bool(np.isfinite(ideal).any())
        self.ideal = np.where(np.isfinite(ideal), ideal, self.moved)
        """bytes that had to move; where nothing was truncated, what moved"""
        self.reused, self.reusable = reused / requested, 1 - self.ideal / per_token / requested
        for cube in (self.reused, self.reusable):
            cube[:1] = np.nan  # nothing has been selected before step 0

    @property
    def is_known(self) -> bool:
        return bool(np.isfinite(self.reused).any())


def chunk_table(reader: TraceReader) -> pd.DataFrame:
    """One row per chunk (and the sinks), in the order of the text: span, first, last, tokens, text, cut, reason, born
    at step (-1: at the end of prefill)."""
    tokens = reader.tokens()
    rows = [
        {
            "span": row.span,
            "first": row.tok_start,
            "last": row.tok_end - 1,
            "tokens": row.tok_end - row.tok_start,
            "text": passage(tokens, row.tok_start, row.tok_end),
            "cut": cut_by(row.reason) if row.kind == "chunk" else "sinks",
            "reason": row.reason,
            "born_step": row.born_step,
        }
        for row in sorted(reader.span_rows(), key=lambda row: row.tok_start)
        if row.kind != "window"
    ]
    return pd.DataFrame(rows)


def _chunks(reader: TraceReader) -> None:
    st.markdown("##### Where the text was cut")
    table = chunk_table(reader)
    if table.empty:
        st.info("No chunk was closed in this run: all tokens are in the open chunk.")
        return
    config: dict[str, Any] = dict(reader.meta.config)
    length, deviation = int(config.get("length", 14)), int(config.get("deviation", 8))
    chunks = table[table["cut"] != "sinks"]
    left_column, right = st.columns([2, 3], gap="medium")
    with left_column:
        cuts = chunks["cut"].value_counts().index
        by_cut = {str(cut): chunks.loc[chunks["cut"] == cut, "tokens"].tolist() for cut in cuts}
        parts.draw(
            reader,
            figures.lengths(by_cut, length, deviation),
            key="sentkv_lengths",
            alt="Lengths of chunks by what cut them",
        )
        at_mark = chunks["cut"].str.startswith("at ").mean() if len(chunks) else float("nan")
        st.caption(
            plain(
                f"Algorithm 2 with L = {length}, Δ = {deviation}, marks = {config.get('marks', 'not recorded')}: "
                f"{len(chunks)} chunks, mean length {chunks['tokens'].mean():.1f} tokens, {at_mark:.0%} end at a mark. "
                "What the paper calls a sentence. The paper prints no such figure; its Figure 3 (b) draws the idea."
            )
        )
    with right:
        shown = table.assign(text=table["text"].str.replace("\n", "⏎"), tokens=_ranges(table))[
            ["span", "tokens", "text", "reason"]
        ]
        column = st.column_config.TextColumn
        widths = {"text": column(width="medium"), "reason": column(width="large")}
        st.dataframe(shown, hide_index=True, width="stretch", height=340, column_config=widths)
        decoded = int((table["born_step"] >= 0).sum())
        st.caption(
            f"Tokens: positions from 0, both ends included, and how many. {decoded} of {len(table)} rows closed while "
            "decoding. The rest of the text is the open chunk, which every step attends."
        )
    parts.download(table, f"{reader.uid}-sentkv-chunks", "Download chunks as CSV")


def _ranges(table: pd.DataFrame) -> list[str]:
    return [f"{a}–{b} ({n})" for a, b, n in zip(table["first"], table["last"], table["tokens"], strict=True)]


def _over_steps(reader: TraceReader, reuse: Reuse) -> None:
    st.markdown("##### How much was reused")
    if not reuse.is_known:
        _nothing_selected(reader)
        return
    step, _, _ = parts.selected(reader)
    parts.draw(
        reader,
        figures.reuse_over_steps(reuse.reused, reuse.reusable, step),
        key="sentkv_reuse_steps",
        alt="Reuse rate over steps",
    )
    st.caption(
        plain(
            "Wanted tokens that lay on the device already, mean over layers and KV heads. Over all steps but the "
            f"first: reused {np.nanmean(reuse.reused):.3f}, reusable {np.nanmean(reuse.reusable):.3f}. The paper says "
            "70 % (sec. 1) and shows no such figure."
        )
    )
    steps, layers, heads = np.indices(reuse.reused.shape)
    frame = pd.DataFrame(
        {
            "step": steps.ravel(),
            "layer": layers.ravel(),
            "kv_head": heads.ravel(),
            "reused": reuse.reused.ravel(),
            "reusable": reuse.reusable.ravel(),
            "moved_bytes": reuse.moved.ravel(),
            "ideal_bytes": reuse.ideal.ravel(),
        }
    )
    parts.download(frame.dropna(subset=["reused"]), f"{reader.uid}-sentkv-reuse")


def _by_head(reader: TraceReader, reuse: Reuse) -> None:
    st.markdown("##### Which heads reuse")
    if not reuse.is_known:
        st.info("No tokens were wanted after the first step, so there is nothing to show by head.")
        return
    maps = [np.full(cube.shape[1:], np.nan) for cube in (reuse.reused, reuse.reusable)]
    for values, cube in zip(maps, (reuse.reused, reuse.reusable), strict=True):
        recorded = np.isfinite(cube).any(0)
        values[recorded] = np.nanmean(cube[:, recorded], axis=0)
    parts.draw(reader, figures.reuse_map(*maps), key="sentkv_reuse_map", alt="Reuse rate by layer and KV head")
    st.caption(
        "Mean over steps after the first. Left: what was reused; truncation makes the heads of a layer reuse the same "
        "number of tokens at each step (sec. 4.2.2). Right: what each head had on the device. Grey: no selection."
    )


def _truncation(reader: TraceReader, reuse: Reuse) -> None:
    st.markdown("##### What truncation cost")
    if not reuse.is_known:
        st.info("Nothing was recalled after the first step, so truncation cost nothing.")
        return
    moved, ideal = (np.nansum(cube, axis=(1, 2)) for cube in (reuse.moved, reuse.ideal))
    parts.draw(
        reader,
        figures.moved_and_ideal(moved, ideal),
        key="sentkv_moved",
        alt="Bytes to the device per step, had to and did",
    )
    if not reuse.truncated:
        st.caption(sentences.NOT_TRUNCATED)
        return
    total, least = float(moved.sum()), float(ideal.sum())
    more = f"{total / least - 1:.1%} more" if least else "nothing had to move"
    st.caption(
        plain(
            f"All layers and KV heads. {si_bytes(total)} moved where {si_bytes(least)} had to: {more}. Step 0 recalls "
            "everything it reads. Truncation recalls again what heads beyond the smallest one had; the paper gives no "
            "figure for it."
        )
    )


def usage(reader: TraceReader) -> float | None:
    """Return the paper's KV usage U (sec. 2.1): tokens transferred to the device by tokens in all, mean over layers, KV
    heads and the steps after step 0, which recalls all that it reads. None: not recorded, or one step."""
    recalled = reader.kv_cube("recalled_tokens")[1:]
    if not np.isfinite(recalled).any():
        return None
    tokens = reader.prompt_tokens() + np.arange(1, len(recalled) + 1)
    return float(np.nanmean(recalled / tokens[:, None, None]))


def _attended(reader: TraceReader) -> None:
    st.markdown("##### What a step attends")
    frame = reader.journal("token_budget")
    if frame.empty:
        st.info(sentences.NO_TOKEN_BUDGET)
        return
    budget = np.full((reader.n_steps, 3), np.nan)
    for step, values in zip(frame["step"], frame["values"], strict=True):
        budget[int(step)] = values[1:4]
    step, _, _ = parts.selected(reader)
    parts.draw(reader, figures.attended(budget, step), key="sentkv_attended", alt="Tokens attended per step")
    transferred, prompt = usage(reader), reader.prompt_tokens()
    share = np.nanmean(budget.sum(1)) / prompt
    noted = reader.journal("preselection_bytes")
    weight = ""
    if not noted.empty:
        held, total = (float(x) for x in noted["values"].iloc[0][:2])
        if total:
            taken_bytes = f"{si_bytes(held)}, {held / total:.1%} of those tokens' KV (paper: 7 %)."
            weight = f" Their extremes, by which they are chosen, take {taken_bytes}"
    st.caption(
        plain(
            f"Per reader (a KV head, or a query head with group=native): {share:.1%} of the prompt's "
            f"{prompt:,} tokens.{weight}"
        )
    )
    if transferred is not None:
        st.caption(plain(f"KV usage U (paper 2.1): {transferred:.1%} of all tokens are transferred in a step."))


def _nothing_selected(reader: TraceReader) -> None:
    if reader.kv_cube("recalled_tokens").size and np.isfinite(reader.kv_cube("recalled_tokens")).any():
        st.info(sentences.NOTHING_SELECTED)
    else:
        st.info("Reused tokens were not recorded per step in this run.")
