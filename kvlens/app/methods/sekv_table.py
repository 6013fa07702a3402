"""One row per span that went to host memory: where it stands, how it lies there, what the gates kept of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.store.cells import integer
from kvlens.store.reader import TraceReader

PER_HEAD = ("rank_k", "rank_v", "err_k", "err_v", "rank_k_post_rope", "err_k_pre_rope", "err_k_post_rope")
"""What is known per (span, layer, KV head); in the table of spans each has its mean, `_min` and `_max` over them."""


_WORDS = {
    "tok_start": ("first token", "position, from 0"),
    "factor_bytes": ("as factors (bytes)", "bytes in host memory of low-rank factors"),
    "raw_form_bytes": ("raw (bytes)", "bytes in host memory of spans stored raw"),
    "exact_bytes": ("exact (bytes)", "bytes of the span's exact keys and values"),
    "raw_share": ("raw (share)", "share of (layer, KV head) that store the span raw"),
    "rank_k": ("rank of keys", "rank in the key space that was decomposed"),
    "rank_v": ("rank of values", ""),
    "err_k": ("error of keys", "relative Frobenius error"),
    "err_v": ("error of values", "relative Frobenius error"),
    "rank_k_post_rope": ("rank of keys, post-RoPE", "rank that the gates would keep after the rotary embedding"),
    "err_k_pre_rope": ("error of keys, pre-RoPE", "relative Frobenius error before the rotary embedding"),
    "err_k_post_rope": ("error of keys, post-RoPE", "relative Frobenius error after the rotary embedding"),
}

#: What the page reads of `per_head`.
STORED = ("form", "cold_bytes", "exact_bytes", "rank_k", "rank_v")


def headings(names: Iterable[str]) -> dict[str, Any]:
    """What the table of spans writes over each column, and says on hover."""
    shown: dict[str, Any] = {}
    for name in names:
        base = name.removesuffix("_min").removesuffix("_max")
        title, meaning = _WORDS.get(base, (name, ""))
        over = "" if base == name else ", min" if name.endswith("_min") else ", max"
        shown[name] = st.column_config.Column(title + over, help=meaning or None)
    return shown


@st.cache_data(max_entries=4, show_spinner="Reading how spans lie in host memory…")
def stored_spans(_reader: TraceReader, uid: str, changed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return STORED of every row of `per_head`, and `per_span`, kept while the trace stays as it is (`changed`)."""
    frame = per_head(_reader)
    table = per_span(frame) if len(frame) else frame
    return frame[list(STORED)].astype({"form": "category"}), table


def per_head(reader: TraceReader) -> pd.DataFrame:
    """One row per (span, layer, KV head): span, layer, kv_head, form, cold_bytes, exact_bytes, tokens, tok_start and
    PER_HEAD.

    Ranks are those of the journal, which knows them also where the span lies raw; of a trace without one, those of the
    factors. Errors are of what lies as factors. NaN: not recorded, or nothing to record (a raw span has no error)."""
    frame = reader.span_heads()
    spans = reader.spans()[["span", "tok_start", "tok_end"]]
    frame = frame.merge(spans, on="span", how="left")
    frame["tokens"] = frame["tok_end"] - frame["tok_start"]
    whole = reader.meta.token_bytes
    frame["exact_bytes"] = np.nan if whole is None else frame["tokens"] * (whole // (reader.n_layers * reader.kv_heads))
    noted = journal(reader)
    if not noted.empty:
        frame = frame.merge(noted, on=["span", "layer", "kv_head"], how="left", suffixes=("", "_noted"))
        for name in ("rank_k", "rank_v"):
            frame[name] = frame.pop(f"{name}_noted").fillna(frame[name])
    for name in PER_HEAD:
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype(np.float64) if name in frame else np.nan
    return frame


def journal(reader: TraceReader) -> pd.DataFrame:
    """What the codec noted, as rows: span, layer, kv_head and a column per name."""
    frame = reader.journal()
    frame = frame[frame["name"].isin(("spans", *PER_HEAD))]
    parts = []
    for step, of_step in frame.groupby("step"):
        ids = np.concatenate(list(of_step.loc[of_step["name"] == "spans", "values"]) or [np.empty(0)])
        for row in of_step[of_step["name"] != "spans"].itertuples():
            values = np.asarray(row.values)
            if len(values) == len(ids):
                parts.append(
                    pd.DataFrame(
                        {
                            "span": ids.astype(int),
                            "layer": integer(row.layer),
                            "kv_head": integer(row.kv_head),
                            "name": row.name,
                            "value": values,
                            "step": step,
                        }
                    )
                )
    if not parts:
        return pd.DataFrame()
    return (
        pd.concat(parts).pivot_table(index=["span", "layer", "kv_head"], columns="name", values="value").reset_index()
    )


def columns_of(table: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Return the spans of `per_span` with the mean, smallest and largest value of some columns."""
    return table[["span", "tok_start", "tokens", *(f"{name}{end}" for name in names for end in ("", "_min", "_max"))]]


def per_span(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per span of `per_head`: span, tok_start, tokens, factor_bytes, raw_form_bytes, exact_bytes (sums over KV
    heads of all layers), raw_share (of them), and mean, min, max of PER_HEAD."""
    raw = frame["form"] == "raw"
    frame = frame.assign(
        factor_bytes=frame["cold_bytes"].where(~raw, 0),
        raw_form_bytes=frame["cold_bytes"].where(raw, 0),
        raw_share=raw * 1.0,
    )
    grouped = frame.groupby("span", sort=True)
    table = grouped[["tok_start", "tokens"]].first().astype(int)
    table = table.join(grouped[["factor_bytes", "raw_form_bytes", "exact_bytes"]].sum(min_count=1)).join(
        grouped["raw_share"].mean()
    )
    for name in PER_HEAD:
        table = table.join(
            grouped[name].agg(["mean", "min", "max"]).set_axis([name, f"{name}_min", f"{name}_max"], axis=1)
        )
    return table.reset_index()
