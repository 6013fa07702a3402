"""The figures behind the player's bars: what full KV would have read of each span, and what this run read of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.spantext import span_texts, window_range
from kvlens.app.ui.common.state import Selection
from kvlens.holds import joined
from kvlens.lens.lines import LEAST, MASSES, mass_name, ranges_in_words
from kvlens.player.lens import sampling
from kvlens.player.payload import needle_tokens
from kvlens.recording.metrics import REGRETS, head_label


def draw_reference_bars(reader: TraceReader, selection: Selection) -> None:
    """The figures at the selected step; one sentence where full attention's masses were not recorded."""
    step, layer, head = selection.step or 0, selection.layer or 0, selection.head or 0
    label = head_label(layer, head, reader.q_heads // reader.kv_heads)
    st.markdown(f"##### What full KV would have read with {label} at step {step}")
    table = listed(reader, step, layer, head)
    if table.empty:
        st.caption(f"Full attention's masses were not recorded for {label} at step {step}{sampling(reader)}.")
        return
    shown = table.assign(needle=table["needle"].map({True: "★", False: ""})).rename(columns=_NAMES)
    shares = {name: st.column_config.NumberColumn(format="%.4f") for name in (*_NAMES.values(), "regret")}
    height = min(300, 38 + 35 * len(shown))
    st.dataframe(shown, hide_index=True, width="stretch", height=height, column_config=shares)
    tail = reader.oracle_tail(step, layer, head)
    name = mass_name(bool(table["reference"].notna().any()))
    regret = regret_words(reader, step, layer, head, float(table["regret"].sum()))
    rest = "" if np.isnan(tail) else f" Spans that are not listed hold {tail:.4f} of {name}."
    st.caption(
        (
            f"{MASSES} This run's mass and regret count a span's summary and rebuilt tokens. Coverage counts exact "
            "tokens alone. ★ marks the needle."
        )
        + regret
        + rest
        + lost(reader, step, layer, head)
    )


def regret_words(reader: TraceReader, step: int, layer: int, head: int, listed_regret: float) -> str:
    """Return the regret of the listed spans, of the others and of the query head in all, which is their sum; empty if
    the query head's regret was not recorded. Stored to 1e-4."""
    line = reader.head_timeline(layer, head).set_index("step")
    recorded = [float(line[name].get(step, np.nan)) for name in REGRETS]
    whole = next((value for value in recorded if np.isfinite(value)), float("nan"))
    if np.isnan(whole):
        return ""
    shown, unlisted = round(listed_regret, 4), round(max(0.0, whole - listed_regret), 4)
    return f" Regret of the listed spans: {shown:.4f}; of the others: {unlisted:.4f}; in all: {shown + unlisted:.4f}."


_NAMES = {"reference": "full KV's mass", "own": "own-query mass", "mass": "this run's mass"}


def lost(reader: TraceReader, step: int, layer: int, head: int) -> str:
    """The tokens with most of full attention that the head attended in no form, as a sentence; nothing where it read
    all that mattered, or it was not recorded."""
    tokens = reader.lost_tokens(step)
    lost_tokens = tokens[(tokens["layer"] == layer) & (tokens["q_head"] == head)]
    if (share := float(lost_tokens["mass"].sum())) < LEAST:
        return ""
    where = ranges_in_words(joined((int(pos), int(pos) + 1) for pos in lost_tokens["pos"]))
    name = mass_name(reader.has_reference_masses())
    return f" Attended in no form: {where}, with {share:.2f} of {name}."


def listed(reader: TraceReader, step: int, layer: int, head: int) -> pd.DataFrame:
    """The spans full attention would have read most: span, reference (full KV's own mass, NaN: not recorded), own
    (own-query mass), mass, regret, kind, tokens (in words), text,
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
            "reference": table["reference"],
            "own": table["own"],
            "mass": table["mass"],
            "regret": table["regret"],
            "kind": table["kind"],
            "tokens": [token_range(start, end) for start, end in ranges],
            "text": span_texts(tokens, ranges),
            "needle": [any(a < end and b > start for a, b in needle) for start, end in ranges],
        }
    )


def token_range(start: int, end: int) -> str:
    """[start, end) in words."""
    if end - start < 1:
        return "no token yet"
    return f"token {start}" if end - start == 1 else f"tokens {start}–{end - 1}"
