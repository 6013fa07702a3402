"""A made-up run with thousands of spans, cheap to make: its steps wander over a few spans, each of which is stored as
many. See ``synthetic``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvlens.instruments import MOST_KEY_BYTES, Effects, SpanKeys, span_key_bytes
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import EventRow, SpanHeadRow, SpanRow, TransferRow
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic

Row = TypeVar("Row", EventRow, TransferRow)
HEAD_FIELDS = [field.name for field in fields(SpanHeadRow)][1:]


def write_wide(
    folder: Path, layers: int, q_heads: int, kv_heads: int, steps: int, spans: int, tokens: int, **meta: Any
) -> str:
    """Write a finished run of about `spans` prompt spans and return its uid. meta: as of `write_synthetic`."""
    length = max(1, tokens // spans)
    writer = partial(SplittingWriter, length=length)
    coarse = max(4, spans // 40)
    return write_synthetic(
        folder, layers, q_heads, kv_heads, steps, coarse, prompt_tokens=tokens, writer_class=writer, **meta
    )


class SplittingWriter(TraceWriter):
    """A writer that stores each entropy span of the prompt as spans of `length` tokens. What happens to a span, happens
    to the first of them."""

    def __init__(self, runs_dir: Path, uid: str | None, trace_level: str, length: int) -> None:
        super().__init__(runs_dir, uid, trace_level)
        self._length = length
        self._first = np.zeros(0, np.int32)
        """id of a span of the prompt -> id of the first span that stands for it"""
        self._shift = 0

    def prefill(self, record: PrefillRecord) -> None:
        """Store the prompt with all spans."""
        parts = [self._parts(span) for span in record.spans]
        counts = np.array([len(rows) for rows in parts])
        self._first = np.append(0, counts.cumsum()[:-1]).astype(np.int32)
        self._shift = int(counts.sum()) - len(parts)
        spans = [replace(row, span=number) for number, row in enumerate(row for rows in parts for row in rows)]
        heads = [
            SpanHeadRow(span, *[getattr(row, name) for name in HEAD_FIELDS])
            for row in record.span_heads
            for span in range(self._first[row.span], self._first[row.span] + counts[row.span])
        ]
        opened = [EventRow(-1, None, None, None, "span_open", span.span) for span in spans]
        cold = [EventRow(-1, None, None, None, "offload", span.span) for span in spans if span.kind == "entropy"]
        keys = self._split_keys(record.span_keys, counts)
        super().prefill(replace(record, spans=spans, span_heads=heads, events=opened + cold, span_keys=keys))

    def step(self, record: StepRecord) -> None:
        """Store a step with the ids of the many spans."""
        scores, oracle, decisions = record.scores, record.oracle, record.decisions
        super().step(
            replace(
                record,
                top_span=self._ids(record.top_span),
                transfers=[self._moved(row) for row in record.transfers],
                events=[self._moved(row) for row in record.events],
                spans=[replace(row, span=row.span + self._shift) for row in record.spans],
                span_heads=[replace(row, span=row.span + self._shift) for row in record.span_heads],
                cuts=[replace(row, span=self._ids(row.span)) for row in record.cuts],
                scores=None if scores is None else replace(scores, span=self._ids(scores.span)),
                oracle=None if oracle is None else replace(oracle, span=self._ids(oracle.span)),
                decisions=decisions and replace(decisions, refused_span=self._ids(decisions.refused_span)),
            )
        )

    def effects(self, effects: Sequence[Effects]) -> None:
        """Store effects with the ids of the many spans."""
        super().effects([replace(each, span=self._ids(each.span)) for each in effects])

    def _parts(self, span: SpanRow) -> list[SpanRow]:
        if span.kind != "entropy":
            return [span]
        edges = [*range(span.tok_start, span.tok_end - self._length + 1, self._length), span.tok_end]
        if len(edges) < 2:
            return [span]
        return [replace(span, tok_start=start, tok_end=end) for start, end in pairwise(edges)]

    def _ids(self, spans: np.ndarray) -> np.ndarray:
        known = np.clip(spans, 0, len(self._first) - 1)
        later = spans >= len(self._first)
        return np.where(spans < 0, spans, np.where(later, spans + self._shift, self._first[known])).astype(np.int32)

    def _moved(self, row: Row) -> Row:
        if row.span is None:
            return row
        known = row.span < len(self._first)
        return replace(row, span=int(self._first[row.span]) if known else row.span + self._shift)

    def _split_keys(self, keys: SpanKeys | None, counts: np.ndarray) -> SpanKeys | None:
        """Return a key per span; None where a run of this size stores none."""
        total = int(counts.sum())
        if keys is None:
            return None
        layers, kv_heads, _, head_dim = keys.keys.shape
        if span_key_bytes(layers, kv_heads, total, head_dim) > MOST_KEY_BYTES:
            return None
        return SpanKeys(keys.form, np.arange(total, dtype=np.int32), np.repeat(keys.keys, counts, axis=2))
