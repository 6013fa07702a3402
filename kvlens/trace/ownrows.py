"""Rows of the tables token, phase, cut, effect and span_key, as the records of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kvlens.instruments import CutRow, Effects, SpanKeys
from kvlens.rows import PromptToken
from kvlens.store.schema import PHASE_COLUMNS
from kvlens.trace.cells import numbers
from kvlens.trace.head import Head


def prompt_tokens(rows: list[dict[str, Any]], columns: Sequence[str]) -> Iterator[PromptToken]:
    """Yield the prompt's tokens. columns: that the table has; without characters their texts follow one another."""
    derived, place = "char_start" not in columns, 0
    for row in rows:
        if row["step"] is not None:
            continue
        start, end = row["char_start"], row["char_end"]
        if derived:
            start, end = place, place + len(row["text"])
            place = end
        yield PromptToken(row["pos"], row["token_id"], row["text"], start, end, row["surprisal"])


def cut_of(row: dict[str, Any]) -> CutRow:
    """Return a checked row of the table cut."""
    lists = {name: np.array(row[name], np.int32) for name in ("span", "dropped", "pos", "rank")}
    score = np.array([np.nan if value is None else value for value in row["score"]], np.float32)
    return CutRow(**(row | lists | {"score": score, "cut": np.nan if row["cut"] is None else row["cut"]}))


def phases_of(rows: list[dict[str, Any]]) -> dict[str, int] | None:
    """Return microseconds by phase of a step's rows of the table phase; None: the step was not timed."""
    return {name.removesuffix("_us"): rows[0][name] for name in PHASE_COLUMNS} if rows else None


def effects_of(rows: pa.Table | None, steps: tuple[int, ...]) -> Effects | None:
    """Return the effects of a checked table, in its order. steps: those over which they are added."""
    if rows is None or not rows.num_rows:
        return None
    columns = {name: numbers(rows[name]).astype(np.int32) for name in ("layer", "kv_head", "span")}
    step, lead = int(numbers(rows["step"])[0]), float(numbers(rows["lead"])[0])
    return Effects(step, lead, **columns, effect=numbers(rows["effect"]).astype(np.float32), steps=steps)


def span_keys_of(rows: pa.Table | None, head: Head) -> SpanKeys | None:
    """Return the mean keys of a checked table, spans in the order of their numbers; None: not recorded."""
    if rows is None or not rows.num_rows:
        return None
    order = np.lexsort([numbers(rows[name]) for name in ("span", "kv_head", "layer")])
    flat = rows["key"].combine_chunks().flatten()
    keys = numbers(flat).astype(np.float32).reshape(rows.num_rows, -1)[order]
    count = rows.num_rows // (head.layers * head.kv_heads)
    spans = numbers(rows["span"])[order[:count]].astype(np.int32)
    return SpanKeys(rows["form"][0].as_py(), spans, keys.reshape(head.layers, head.kv_heads, count, -1))
