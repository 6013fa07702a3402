"""What a method dropped for good, as the run recorded it: by span and KV head, with the line of the cut."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.cuts import dropped_map, span_cuts, step_cuts
from kvlens.app.ui.common import parts
from kvlens.app.ui.common.parts import draw
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted


def cuts(reader: TraceReader) -> bool:
    """The map over all KV heads and the cut of the selected one; False, and nothing drawn, where none was recorded."""
    rows = reader.all_cuts()
    if rows.empty:
        return False
    st.markdown("##### What was evicted")
    _, layer, q_head = parts.selected(reader)
    kv_head = q_head // (reader.q_heads // reader.kv_heads)
    label, head_rows = f"L{layer} KV{kv_head}", of_head(rows, layer, kv_head)
    table = by_span(reader.spans(), head_rows)
    ranked = bool(head_rows["score"].notna().any())
    how = "by the method's score, the best stayed" if ranked else "by their position, without a score"
    dropped, tokens = int(table["dropped"].sum()), int(table["tokens"].sum())
    st.caption(
        f"Tokens were ranked {how}. The method evicted the tokens below the cut for the rest of the run. {label} "
        f"evicted {counted(dropped, 'token')} of {tokens:,}. Select another query head on Replay or Heads."
    )
    share, names, spans = shares(reader, rows)
    draw(reader, dropped_map(share, names, spans), key="cuts_map", alt="Share of each span's tokens evicted by KV head")
    figure = span_cuts(table, label)
    draw(reader, figure, key="cuts_spans", alt=f"Tokens kept and evicted of each span by {label}", data=table)
    later = head_rows[(head_rows["step"] >= 0) & head_rows["score"].notna()]
    if len(later):
        shown = later[["step", "pos", "score", "cut"]]
        draw(reader, step_cuts(shown, label), key="cuts_steps", alt=f"Tokens {label} evicted by step", data=shown)
    return True


def of_head(rows: pd.DataFrame, layer: int, kv_head: int) -> pd.DataFrame:
    """The rows that speak of a KV head: its own, and those alike for all."""
    own_mask = (rows["layer"].isna() | (rows["layer"] == layer)) & (
        rows["kv_head"].isna() | (rows["kv_head"] == kv_head)
    )
    return rows[own_mask]


def by_span(spans: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per span by first token, the window's left out: span, tokens, dropped, and score of the best token dropped
    (NaN: none) with the lowest score that stayed then (cut)."""
    spans = spans[spans["kind"] != "window"].sort_values(["tok_start", "span"])
    dropped_tokens = rows.groupby("span")["dropped"].sum()
    best = rows.sort_values("score", ascending=False, na_position="last").drop_duplicates("span").set_index("span")
    cut_scores = rows.loc[rows["step"] < 0, "cut"]
    cut = spans["span"].map(best["cut"]).astype(float)
    return pd.DataFrame(
        {
            "span": spans["span"].to_numpy(np.int64),
            "tokens": (spans["tok_end"] - spans["tok_start"]).to_numpy(np.int64),
            "dropped": spans["span"].map(dropped_tokens).fillna(0).to_numpy(np.int64),
            "score": spans["span"].map(best["score"]).to_numpy(np.float64, na_value=np.nan),
            "cut": cut.fillna(float(cut_scores.iloc[0]) if len(cut_scores) else np.nan).to_numpy(np.float64),
        }
    )


def shares(reader: TraceReader, rows: pd.DataFrame) -> tuple[np.ndarray, list[str], list[int]]:
    """Share of every span's tokens dropped, float [layers x KV heads, spans], the names of the rows, the spans by first
    token."""
    tables = [
        by_span(reader.spans(), of_head(rows, layer, head))
        for layer in range(reader.n_layers)
        for head in range(reader.kv_heads)
    ]
    names = [f"L{layer} KV{head}" for layer in range(reader.n_layers) for head in range(reader.kv_heads)]
    share = np.stack([(table["dropped"] / table["tokens"].clip(lower=1)).to_numpy(np.float64) for table in tables])
    return share, names, tables[0]["span"].tolist()
