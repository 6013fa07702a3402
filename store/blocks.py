"""A block of steps on its way to disk: preallocated arrays that the engine's thread fills and the flush thread turns
into Arrow.

Filling copies, because the recorder reuses its arrays. The copy is contiguous ([step, layer, head]); the flush thread
reorders to (layer, head, step), which makes one head's timeline one short scan and costs the engine nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kvlens.decisions import Decisions
from kvlens.instruments import Oracle, Scores
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS, JournalRow
from kvlens.store.errors import TraceError
from kvlens.store.rowtables import check_shape, copied, loss_rows, phase_rows, rows_table, step_tables
from kvlens.store.schema import MAX_SPAN, head_type, kv_type
from kvlens.store.spanlists import (
    copied_decisions,
    copied_oracle,
    copied_scores,
    decision_table,
    oracle_table,
    score_table,
    span_key_table,
)

_HEAD_INDEX = {name: index for index, name in enumerate(HEAD_COLUMNS)}
_KV_INDEX = {name: index for index, name in enumerate(KV_COLUMNS)}
_UNSIGNED: dict[str, Any] = {"USMALLINT": np.uint16, "UINTEGER": np.uint32, "UBIGINT": np.uint64}


@dataclass(frozen=True)
class Shape:
    """The sizes all records of a run share."""

    layers: int
    q_heads: int
    kv_heads: int
    top_k: int


def _array(values: np.ndarray, kind: str) -> pa.Array:
    """A float array (NaN = NULL) as a column of the SQL type `kind`; floats are rounded to 1e-4, which makes them
    compress."""
    flat = np.ascontiguousarray(values).reshape(-1)
    missing = np.isnan(flat)
    if kind == "FLOAT":
        return pa.array(np.round(flat.astype(np.float64), 4).astype(np.float32), mask=missing)
    whole = np.where(missing, 0, flat)
    if kind == "BOOLEAN":
        return pa.array(whole != 0, mask=missing)
    target = _UNSIGNED[kind]
    largest = float(min(np.iinfo(target).max, 2**53))
    if whole.size and (whole.min() < 0 or whole.max() > largest or (whole != np.rint(whole)).any()):
        raise TraceError(
            f"A count of the trace is negative, fractional or above {largest:.0f}; this is a bug in what logs it."
        )
    return pa.array(whole.astype(target), mask=missing)


class Block:
    """Up to `capacity` consecutive steps."""

    def __init__(self, shape: Shape, capacity: int, keep_spans: bool) -> None:
        self.shape, self.capacity, self.keep_spans = shape, capacity, keep_spans
        lead = (capacity, shape.layers, shape.q_heads)
        self.head = np.full((len(HEAD_COLUMNS), *lead), np.nan, np.float32)
        self.kv = np.full((len(KV_COLUMNS), capacity, shape.layers, shape.kv_heads), np.nan, np.float64)
        self.top_span = np.empty((*lead, shape.top_k if keep_spans else 0), np.int32)
        self.top_mass = np.empty(self.top_span.shape, np.float32)
        self.tail_mass = np.empty(lead, np.float32)
        self.records: list[StepRecord] = []
        self.journal: list[JournalRow] = []
        self.scores: list[tuple[int, Scores]] = []
        """(step, what it ranked), for the steps that ranked spans"""
        self.oracles: list[tuple[int, Oracle]] = []
        """(step, full attention), for the steps that were sampled"""
        self.decisions: list[tuple[int, Decisions]] = []
        """(step, what was decided), for the steps that decided something"""
        self.n = 0

    def reset(self) -> None:
        """Empties the block; a column that the next steps do not log is then NULL."""
        self.head.fill(np.nan)
        self.kv.fill(np.nan)
        self.records, self.journal, self.scores, self.oracles, self.n = [], [], [], [], 0
        self.decisions = []

    def put(self, record: StepRecord) -> None:
        """Copies one record's arrays in and keeps its small rows. What raises leaves the block as it was, but for room
        not yet counted."""
        n, shape = self.n, self.shape
        q_shape, kv_shape = (shape.layers, shape.q_heads), (shape.layers, shape.kv_heads)
        for columns, index, store, want in (
            (record.head, _HEAD_INDEX, self.head, q_shape),
            (record.kv, _KV_INDEX, self.kv, kv_shape),
        ):
            for name, value in columns.items():
                if name not in index:
                    raise TraceError(
                        f"Step {record.step} logs {name!r}, which is no column of the trace; see kvlens/rows.py."
                    )
                check_shape(record.step, name, value, want)
                store[index[name], n] = value
        if self.keep_spans:
            top_shape = (*q_shape, shape.top_k)
            check_shape(record.step, "top_span", record.top_span, top_shape)
            check_shape(record.step, "top_mass", record.top_mass, top_shape)
            check_shape(record.step, "tail_mass", record.tail_mass, q_shape)
            self.top_span[n] = record.top_span
            self.top_mass[n] = record.top_mass
            self.tail_mass[n] = record.tail_mass
        scores = (
            None
            if record.scores is None or not self.keep_spans
            else copied_scores(record.step, record.scores, kv_shape)
        )
        oracle = (
            None if record.oracle is None or not self.keep_spans else copied_oracle(record.step, record.oracle, q_shape)
        )
        decisions = None if record.decisions is None else copied_decisions(record.step, record.decisions)
        journal = copied(record.journal)
        # from here on nothing fails, so that a step is in all tables or in none
        if scores is not None:
            self.scores.append((record.step, scores))
        if oracle is not None:
            self.oracles.append((record.step, oracle))
        if decisions is not None:
            self.decisions.append((record.step, decisions))
        self.journal += journal
        self.records.append(record)
        self.n = n + 1

    def _keys(self, heads: int, name: str) -> dict[str, np.ndarray]:
        n, layers, first_step = self.n, self.shape.layers, self.records[0].step
        return {
            "step": np.tile(np.arange(first_step, first_step + n, dtype=np.uint32), layers * heads),
            "layer": np.repeat(np.arange(layers, dtype=np.uint8), heads * n),
            name: np.tile(np.repeat(np.arange(heads, dtype=np.uint8), n), layers),
        }

    def head_table(self) -> pa.Table:
        """Rows of head_step, ordered (layer, q_head, step)."""
        keys = self._keys(self.shape.q_heads, "q_head")
        group = self.shape.q_heads // self.shape.kv_heads
        columns = {c: _array(self.head[i, : self.n].transpose(1, 2, 0), head_type(c)) for c, i in _HEAD_INDEX.items()}
        return pa.table(keys | {"kv_head": (keys["q_head"] // group).astype(np.uint8)} | columns)

    def kv_table(self) -> pa.Table:
        """Rows of kv_step, ordered (layer, kv_head, step)."""
        columns = {c: _array(self.kv[i, : self.n].transpose(1, 2, 0), kv_type(c)) for c, i in _KV_INDEX.items()}
        return pa.table(self._keys(self.shape.kv_heads, "kv_head") | columns)

    def span_table(self) -> pa.Table:
        """Rows of head_span, ordered like head_step: the top spans of each head as two lists of equal length."""
        spans = self.top_span[: self.n].transpose(1, 2, 0, 3)
        masses = self.top_mass[: self.n].transpose(1, 2, 0, 3)
        valid = (spans >= 0) & ~np.isnan(masses)
        kept_tokens = spans[valid]
        if kept_tokens.size and kept_tokens.max() > MAX_SPAN:
            raise TraceError(f"Span ids above {MAX_SPAN} cannot be stored; make longer spans or log fewer.")
        offsets = pa.array(np.concatenate(([0], np.cumsum(valid.sum(-1).reshape(-1)))).astype(np.int32))
        codes = np.rint(255 * np.sqrt(np.clip(masses[valid], 0, 1))).astype(np.uint8)
        lists = {
            "span": pa.ListArray.from_arrays(offsets, pa.array(kept_tokens.astype(np.uint16))),
            "mass": pa.ListArray.from_arrays(offsets, pa.array(codes)),
        }
        tail = _array(self.tail_mass[: self.n].transpose(1, 2, 0), "FLOAT")
        return pa.table(self._keys(self.shape.q_heads, "q_head") | lists | {"tail_mass": tail})

    def score_table(self) -> pa.Table:
        """Rows of kv_span, see ``scores.py``."""
        return score_table(self.scores, self.shape.layers, self.shape.kv_heads)

    def decision_table(self) -> pa.Table:
        """Rows of decision, see ``decisions.py``."""
        return decision_table(self.decisions)

    def oracle_table(self) -> pa.Table:
        """Rows of oracle, see ``oracles.py``."""
        return oracle_table(self.oracles)


def block_tables(block: Block, prompt_tokens: int, trace_level: str) -> list[tuple[str, pa.Table]]:
    """Return the tables of a block of steps by name: rows of a table of the trace, without those that a level below
    `spans` leaves out."""
    records = block.records
    tables = list(step_tables(records, prompt_tokens).items())
    for name, rows in (
        ("span", [row for record in records for row in record.spans]),
        ("span_head", [row for record in records for row in record.span_heads]),
        ("transfer", [row for record in records for row in record.transfers]),
        ("event", [row for record in records for row in record.events]),
        ("journal", block.journal),
        ("cut", [row for record in records for row in record.cuts]),
        ("loss", loss_rows(records)),
        ("phase", phase_rows(records)),
    ):
        tables.append((name, rows_table(name, rows)))
    tables += [("head_step", block.head_table()), ("kv_step", block.kv_table()), ("decision", block.decision_table())]
    if trace_level == "spans":
        tables += [
            ("head_span", block.span_table()),
            ("kv_span", block.score_table()),
            ("oracle", block.oracle_table()),
        ]
    return tables


def prefill_tables(record: PrefillRecord, heads: tuple[int, int], trace_level: str) -> list[tuple[str, pa.Table]]:
    """Return the tables of what prefill found, in the same way. heads: layers, KV heads."""
    tables = [
        ("token", rows_table("prompt", record.tokens)),
        ("span", rows_table("span", record.spans)),
        ("span_head", rows_table("span_head", record.span_heads)),
        ("transfer", rows_table("transfer", record.transfers)),
        ("event", rows_table("event", record.events)),
        ("journal", rows_table("journal", copied(record.journal))),
        ("cut", rows_table("cut", record.cuts)),
    ]
    if record.decisions is not None:
        tables.append(("decision", decision_table([(-1, copied_decisions(-1, record.decisions))])))
    if trace_level == "spans" and record.span_keys is not None:
        tables.append(("span_key", span_key_table(record.span_keys, heads)))
    return tables
