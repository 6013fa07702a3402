"""What a run checks about itself: sums kept while it is recorded, and the truths they must come to."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlens.memory.ledger import Entry
from kvlens.memory.tiers import Memory
from kvlens.recording.snapshot import Measured
from kvlens.rows import SelfCheck, TransferRow

MASS_TOLERANCE = 1e-3


class Tally:
    """Counts what the self-checks compare."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.worst_mass = self.worst_oracle = 0.0
        self.oracle_rows = 0
        self.head_rows = self.steps = self.over_budget = 0
        self.kv_bytes, self.row_bytes = {"h2d": 0, "d2h": 0}, {"h2d": 0, "d2h": 0}

    def step(self, limit: int | None, peak: int) -> None:
        self.steps += 1
        self.over_budget += limit is not None and peak > limit

    def measured(self, step: Measured) -> None:
        self.worst_mass = max(self.worst_mass, step.worst)
        self.head_rows += step.head["entropy"].size
        if step.oracle is not None:
            self.worst_oracle = max(self.worst_oracle, step.oracle_worst)
            self.oracle_rows += int(np.isfinite(step.oracle.tail_full).sum())

    def opened(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.kv_bytes[entry.direction] += entry.bytes

    def rows(self, rows: list[TransferRow]) -> None:
        for row in rows:
            self.row_bytes[row.direction] += row.bytes

    def checks(self) -> list[SelfCheck]:
        shape, total, limit = self.memory.shape, self.memory.ledger.total, self.memory.account.limit
        expected = self.steps * shape.layers * shape.q_heads
        moved, rows = (", ".join(f"{d} {table[d]} B" for d in ("h2d", "d2h")) for table in (total, self.row_bytes))
        checks: list[tuple[str, bool, float, Any]] = [
            (
                "masses add up to 1",
                self.worst_mass <= MASS_TOLERANCE,
                self.worst_mass,
                "largest |sum of masses over roles - 1| over all (step, layer, query head)",
            ),
            (
                "no row is missing",
                self.head_rows == expected,
                self.head_rows,
                f"{expected} rows of (step, layer, query head) expected",
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
        if self.oracle_rows:
            checks.append(
                (
                    "full attention adds up to 1",
                    self.worst_oracle <= MASS_TOLERANCE,
                    self.worst_oracle,
                    f"largest |sum over spans - 1| over {self.oracle_rows} rows of (sampled step, layer, query head)",
                )
            )
        return [SelfCheck(name, bool(passed), float(value), detail) for name, passed, value, detail in checks]
