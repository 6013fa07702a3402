"""What a run checks about itself: sums kept while it is recorded, and the truths they must come to.

A figure that is no number fails every check that reads it: NaN is never the smaller of two errors, and a row counts
only where it is finite.

The range of every figure of a step is checked before it is recorded: shares in 0..1, counts and bytes from 0 on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvlens.budget import BudgetAccount
from kvlens.link.transfers import Entry, TransferLog
from kvlens.methods.faults import FIGURE, MethodFault
from kvlens.recording.metrics import METRICS
from kvlens.recording.snapshot import Measured
from kvlens.records import SelfCheck, StepRecord
from kvlens.rows import MASS_COLUMNS, TransferRow
from kvlens.shape import KVShape

MASSES = "masses add up to 1"
FINITE = "next-token figures are numbers"
"""names of self-checks, as they are stored"""

MASS_TOLERANCE = 1e-3


def worse(error: float, other: float) -> float:
    """The larger of two errors; NaN is worse than any."""
    return float(np.maximum(error, other))


class Tally:
    """Counts what the self-checks compare."""

    def __init__(self, shape: KVShape, ledger: TransferLog, account: BudgetAccount) -> None:
        self._shape, self._ledger, self._account = shape, ledger, account
        self.worst_mass = self.worst_oracle = 0.0
        self.oracle_rows = self.oracle_expected = 0
        self.head_rows = self.steps = self.over_budget = 0
        self.no_numbers = 0
        """steps whose next-token figures are no numbers"""
        self.kv_bytes, self.row_bytes = {"h2d": 0, "d2h": 0}, {"h2d": 0, "d2h": 0}

    def step(self, limit: int | None, peak: int, *next_token: float) -> None:
        """next_token: figures of the step's next-token distribution, each a number."""
        self.steps += 1
        self.over_budget += limit is not None and not peak <= limit
        self.no_numbers += not all(map(math.isfinite, next_token))

    def count_step(self, step: Measured, sampled: int) -> None:
        """sampled: layers whose full attention was to be measured at this step."""
        self.worst_mass = worse(self.worst_mass, step.worst)
        numbers = [np.isfinite(step.head[name]) for name in ("entropy", *MASS_COLUMNS)]
        self.head_rows += int(np.logical_and.reduce(numbers).sum())
        self.oracle_expected += sampled * self._shape.q_heads
        if step.oracle is not None:
            self.worst_oracle = worse(self.worst_oracle, step.oracle_worst)
            self.oracle_rows += int(np.isfinite(step.oracle.tail_full).sum())

    def count_entries(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.kv_bytes[entry.direction] += entry.bytes

    def rows(self, rows: list[TransferRow]) -> None:
        for row in rows:
            self.row_bytes[row.direction] += row.bytes

    def checks(self) -> list[SelfCheck]:
        shape, total, limit = self._shape, self._ledger.total, self._account.limit
        expected = self.steps * shape.layers * shape.q_heads
        moved, rows = (", ".join(f"{d} {table[d]} B" for d in ("h2d", "d2h")) for table in (total, self.row_bytes))
        checks: list[tuple[str, bool, float, Any]] = [
            (
                MASSES,
                self.worst_mass <= MASS_TOLERANCE,
                self.worst_mass,
                "largest |sum of masses over roles - 1| over all (step, layer, query head)",
            ),
            (
                "no row is missing",
                self.head_rows == expected,
                self.head_rows,
                f"{expected} rows of (step, layer, query head) expected, their masses and entropy finite",
            ),
            (
                FINITE,
                self.no_numbers == 0,
                self.no_numbers,
                "steps whose log-probability, entropy or divergence is not finite",
            ),
            (
                "ledger rows equal bytes moved",
                self.row_bytes == total,
                sum(total.values()),
                f"moved: {moved}; rows: {rows}",
            ),
            (
                "bytes per KV head equal ledger",
                self.kv_bytes == total,
                sum(self.kv_bytes.values()),
                "sums over (step, layer, KV head) and prefill against the ledger",
            ),
            (
                "peak within budget",
                self.over_budget == 0,
                self.over_budget,
                "no limit was set" if limit is None else f"steps whose peak passed {limit} B",
            ),
        ]
        if self.oracle_expected:
            whole = self.oracle_rows == self.oracle_expected
            checks.append(
                (
                    "full attention adds up to 1",
                    whole and self.worst_oracle <= MASS_TOLERANCE,
                    self.worst_oracle,
                    f"largest |sum over spans - 1| over {self.oracle_rows} rows of (sampled step, layer, query head), "
                    f"{self.oracle_expected} expected; in layers with sink logits, sums above 1 only",
                )
            )
        return [SelfCheck(name, bool(passed), float(value), detail) for name, passed, value, detail in checks]


TOLERANCE = 1e-3
"""error allowed beyond a range, as of sums of masses (selfcheck.py)"""
SHARE = (0.0, 1.0)
SIZE = (0.0, float("inf"))
RANGES = {
    "share": SHARE,
    "0 or 1": SHARE,
    "cosine": (-1.0, 1.0),
    **dict.fromkeys(("nats", "spans", "bytes", "entries", "tokens"), SIZE),
}
"""unit of a metric -> its range"""
HOOKS = {"corrected": "select", "similarity": "select", "read_bytes": "select"}
"""metric -> the hook whose answer it is made of; the others are measured of all that the method's hooks did"""


def check_figures(method: str, record: StepRecord) -> None:
    """Raise MethodFault with the code FIGURE if a figure of a step lies outside its range. It names the metric, its
    value, and the layer where it has one. NaN is not recorded, and in no range."""
    for name, values, (low, high) in _figures(record):
        with np.errstate(invalid="ignore"):
            wrong = (values < low - TOLERANCE) | (values > high + TOLERANCE) | np.isinf(values)
        if not wrong.any():
            continue
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        layer = int(place[0]) if wrong.ndim > 1 else None
        problem, expected = f"leads to a wrong {name}", f"{low:g} to {high:g}" if high < SIZE[1] else f"{low:g} or more"
        actual = f"{float(values[place]):g}"
        raise MethodFault(FIGURE, method, HOOKS.get(name, "step"), problem, expected, actual, layer, record.step)


def _figures(record: StepRecord) -> Iterator[tuple[str, np.ndarray, tuple[float, float]]]:
    """Name, values and range of each figure."""
    for columns in (record.head, record.kv):
        for name, values in columns.items():
            metric = METRICS.get(name)
            if metric is not None and metric.unit in RANGES:
                yield name, values, RANGES[metric.unit]
    yield "top_mass", record.top_mass, SHARE
    yield "tail_mass", record.tail_mass, SHARE
    for name in ("resident_bytes", "peak_bytes", "cold_bytes"):
        yield name, np.array([getattr(record, name)]), SIZE
    yield "transfer", np.array([row.bytes for row in record.transfers]), SIZE
    if record.oracle is not None:
        for name in ("full", "mass", "tail_full", "unread", "lost_mass"):
            values = getattr(record.oracle, name)
            if values is not None:
                yield f"full attention ({name})", values, SHARE
