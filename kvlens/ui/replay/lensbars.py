"""The bars of the selected head: what full KV would have read of each span, and what this run read of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.figures.loss import span_bars
from kvlens.figures.metrics import head_label
from kvlens.lens.lines import LEAST, joined, ranges_in_words
from kvlens.recording.sampling import words
from kvlens.ui.common import session
from kvlens.ui.common.chart import chart
from kvlens.ui.common.data import TraceReader
from kvlens.ui.common.player.payload import needle_tokens
from kvlens.ui.common.spantext import span_text, window_range
from kvlens.ui.common.state import Selection

KEY = "lens_bars"


def bars(reader: TraceReader, chosen: Selection) -> None:
    """The bars at the selected step; one sentence where full attention's masses were not recorded."""
    step, layer, head = chosen.step or 0, chosen.layer or 0, chosen.head or 0
    label = head_label(layer, head, reader.q_heads // reader.kv_heads)
    table = listed(reader, step, layer, head)
    if table.empty:
        st.caption(f"Full attention's masses were not recorded for {label} at step {step}{sampling(reader)}.")
        return
    key = f"{KEY}_{step}_{layer}_{head}"
    alt = f"Bars: full KV's and this run's attention mass per span for {label} at step {step}"
    with st.container(key=KEY):
        chart(
            span_bars(table, label, step, chosen.span),
            table,
            f"{reader.uid}-step{step}-L{layer}-Q{head}-oracle",
            key,
            alt,
            on_select=lambda: _picked(key),
        )
    tail = reader.oracle_tail(step, layer, head)
    rest = "" if np.isnan(tail) else f" Spans that are not listed hold {tail:.4f} of full KV's mass."
    st.caption(
        (
            "Full attention of this run's own query over the exact keys of all positions. This run's mass on a span "
            "counts its summary and what was rebuilt of it, as regret does; coverage counts tokens attended exactly "
            "alone. ★ marks the needle; a click selects a span."
        )
        + rest
        + lost(reader, step, layer, head)
    )


def lost(reader: TraceReader, step: int, layer: int, head: int) -> str:
    """The tokens with most of full attention that the head attended in no form, as a sentence; nothing where it read
    all that mattered, or it was not recorded."""
    tokens = reader.lost_tokens(step)
    mine = tokens[(tokens["layer"] == layer) & (tokens["q_head"] == head)]
    if (share := float(mine["mass"].sum())) < LEAST:
        return ""
    where = ranges_in_words(joined((int(pos), int(pos) + 1) for pos in mine["pos"]))
    return f" Attended in no form: {where}, with {share:.2f} of full KV's mass."


def listed(reader: TraceReader, step: int, layer: int, head: int) -> pd.DataFrame:
    """The spans full attention would have read most: span, full, mass, regret, kind, tokens (in words), text,
    needle."""
    table = reader.oracle(step, layer, head)
    tokens = reader.tokens()
    written = int(tokens["step"].isna().sum()) + step
    window = window_range(reader.spans(), step, written) if (table["kind"] == "window").any() else (0, 0)
    ranges = [
        window if kind == "window" else (int(a), int(b))
        for kind, a, b in zip(table["kind"], table["tok_start"], table["tok_end"], strict=True)
    ]
    needle = needle_tokens(tokens, reader.meta.needle)
    return pd.DataFrame(
        {
            "span": table["span"],
            "full": table["full"],
            "mass": table["mass"],
            "regret": table["regret"],
            "kind": table["kind"],
            "tokens": [token_range(start, end) for start, end in ranges],
            "text": [span_text(tokens, start, end) for start, end in ranges],
            "needle": [any(a < end and b > start for a, b in needle) for start, end in ranges],
        }
    )


def token_range(start: int, end: int) -> str:
    """[start, end) in words."""
    if end - start < 1:
        return "no token yet"
    return f"token {start}" if end - start == 1 else f"tokens {start}–{end - 1}"


def sampling(reader: TraceReader) -> str:
    """What of full attention a run recorded, as the end of a sentence."""
    sampled = reader.meta.oracle
    if not sampled:
        return ": this run did not record them"
    return f"; recorded were {words(sampled, reader.n_layers)}"


def _picked(key: str) -> None:
    """A click on a bar selects its span, everywhere."""
    points = st.session_state[key]["selection"]["points"]
    if points:
        session.change({"span": int(points[0]["customdata"][0])})
