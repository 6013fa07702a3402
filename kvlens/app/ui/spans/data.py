"""Frames behind the Spans page. Everything in them is a recorded column, or a sum of one; NaN: not recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.ui.common.spantext import span_texts, window_range
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.spans.cuts import Cut, Text, previews
from kvlens.player.payload import needle_tokens
from kvlens.rows import SPAN_STATES
from kvlens.store.reader import TraceReader
from kvlens.tables.frames import token_nats


@dataclass(frozen=True)
class Tokens:
    """The text, token by token, prompt and generated."""

    text: list[str]
    nats: np.ndarray
    """surprisal: of the prompt as prefill saw it, of a generated token under the logits that chose it; NaN: not
    recorded"""
    prompt: int
    """how many belong to the prompt"""
    needle: list[list[int]]
    """token ranges [start, end)"""

    @classmethod
    def read(cls, reader: TraceReader, frame: pd.DataFrame) -> Tokens:
        generated = frame["step"].notna().to_numpy()
        needle = needle_tokens(frame, reader.meta.needle)
        return cls([str(text) for text in frame["text"]], token_nats(frame), int((~generated).sum()), needle)

    def in_needle(self, start: int, end: int) -> bool:
        """Whether a token of [start, end) belongs to the needle."""
        return any(start < b and end > a for a, b in self.needle)


#: What spans can be coloured by: column of `span_table` -> how the page calls it, with its unit.
COLOURS = {
    "mass": "mass (share)",
    "reference": "full KV's mass (share)",
    "own": "own-query mass (share)",
    "regret": "regret (share)",
    "state": "state",
    "tok_start": "position (first token)",
    "mean_surprisal": "mean surprisal (nats)",
}


def span_table(reader: TraceReader, tokens: Tokens, frame: pd.DataFrame, selection: Selection) -> pd.DataFrame:
    """The spans alive at the selected step, by their first token: span, kind, tok_start, tok_end (the window's as it is
    at this step), length, text, mean_surprisal, mass (the selected query head's, NaN: not among those it listed),
    reference (full KV's own, likewise), own (own-query mass), regret, state (for its KV head), host_bytes (in host
    memory for the KV head), moved_bytes (to the device for it, all steps), needle, reason. `frame`: the reader's
    tokens."""
    step, layer, head = selection.step or 0, selection.layer or 0, selection.head or 0
    kv_head = head // (reader.q_heads // reader.kv_heads)
    every = reader.spans()
    alive = every[(every["born_step"] <= step) & ~(every["died_step"] <= step)].copy()
    window = window_range(every, step, tokens.prompt + step)
    inside = alive["kind"] == "window"
    alive.loc[inside, ["tok_start", "tok_end"]] = window
    if window[0] == window[1]:
        alive = alive[~inside]
    alive = alive.sort_values(["tok_start", "span"], ignore_index=True)
    ranges = [(int(a), int(b)) for a, b in zip(alive["tok_start"], alive["tok_end"], strict=True)]
    ids = alive["span"].astype(np.int64)
    listed, oracle = reader.head_spans(step, layer, head), reader.oracle(step, layer, head)
    states = reader.span_states(step, layer, kv_head).set_index("span")["state"]
    cold = reader.span_heads(layer, kv_head).set_index("span")["cold_bytes"]
    return pd.DataFrame(
        {
            "span": ids,
            "kind": alive["kind"],
            "tok_start": [start for start, _ in ranges],
            "tok_end": [end for _, end in ranges],
            "length": [end - start for start, end in ranges],
            "text": span_texts(frame, ranges),
            "mean_surprisal": [_mean(tokens.nats[start:end]) for start, end in ranges],
            "mass": _by_span(ids, oracle.set_index("span")["mass"].combine_first(listed.set_index("span")["mass"])),
            "reference": _by_span(ids, oracle.set_index("span")["reference"]),
            "own": _by_span(ids, oracle.set_index("span")["own"]),
            "regret": _by_span(ids, oracle.set_index("span")["regret"]),
            "state": ids.map(states).where(lambda state: state.isin(SPAN_STATES), None),
            "host_bytes": _by_span(ids, cold),
            "moved_bytes": _moved(reader, ids, layer, kv_head),
            "needle": [tokens.in_needle(start, end) for start, end in ranges],
            "reason": alive["reason"],
        }
    )


def _by_span(ids: pd.Series, values: pd.Series) -> np.ndarray:
    return ids.map(values).to_numpy(np.float64, na_value=np.nan)


def _mean(nats: np.ndarray) -> float:
    recorded = nats[np.isfinite(nats)]
    return float(recorded.mean()) if recorded.size else float("nan")


def _moved(reader: TraceReader, ids: pd.Series, layer: int, kv_head: int) -> np.ndarray:
    """Bytes of each span to the device for one KV head, all steps; a copy for a whole layer counts in equal parts.
    NaN: copies were not recorded."""
    if reader.meta.lacks("transfer"):
        return np.full(len(ids), np.nan)
    copies = reader.transfers(layer=layer, kv_head=kv_head)
    copies = copies[(copies["direction"] == "h2d") & copies["span"].notna()]
    share = np.where(copies["kv_head"].isna(), copies["bytes"] // reader.kv_heads, copies["bytes"])
    sums = pd.Series(share, index=copies["span"].astype(np.int64)).groupby(level=0).sum()
    return ids.map(sums).fillna(0).to_numpy(np.float64)


@dataclass(frozen=True)
class View:
    """What the page shows: the shared selection and the run's tokens and spans."""

    chosen: Selection
    column: str
    """by which spans are coloured"""
    frame: pd.DataFrame
    """the reader's tokens"""
    tokens: Tokens
    table: pd.DataFrame
    """as `span_table`"""

    @property
    def selected(self) -> int | None:
        return self.chosen.span


@st.cache_data(max_entries=32, show_spinner="Cutting the text by every segmenter…")
def other_cuts(_reader: TraceReader, uid: str, changed: int) -> list[Cut]:
    """What the segmenters make of the run's text, kept while the trace stays as it is (`changed`). ValueError: it
    cannot be cut."""
    return previews(_reader, Text.read(_reader, _reader.tokens()))
