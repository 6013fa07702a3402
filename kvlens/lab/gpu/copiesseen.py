"""What a run's own records say of its copies while it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.intervals import overlap

if TYPE_CHECKING:
    from kvlens.recording.facts import Seen
    from kvlens.records import PrefillRecord, StepRecord


@dataclass
class CopiesSeen:
    """Keeps what a run says of its copies; as a sink, or beside the one that writes the trace."""

    steps: list[StepRecord] = field(default_factory=list)

    def begun(self, uid: str) -> None:
        """The row has it from the store."""

    def note_step(self, visited: Seen) -> None:
        """What is wanted is known when the step's copies have ended."""

    def decoded(self, text: str) -> None:
        """The row has it from the store."""

    def sketched(self, step: int, attended: np.ndarray, coverage: np.ndarray | None) -> None:
        """Nothing of it is wanted."""

    def prefill(self, record: PrefillRecord) -> None:
        """What counts is what decoding moves."""

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def figures(self) -> dict[str, Any]:
        """Bytes while decoding, seconds waited, seconds of copies, and the share of these that passed while the model
        did not stand still for any, at the least."""
        copies = [row for step in self.steps for row in step.transfers]
        moved = {side: sum(row.bytes for row in copies if row.direction == side) for side in ("h2d", "d2h")}
        start, dur, wait = (_column(self.steps, name) for name in ("t_us", "dur_us", "wait_us"))
        started_job, finished, blocking = (_column(copies, name) for name in ("start_us", "end_us", "blocking"))
        sums = overlap(start, dur, wait, started_job, finished, blocking.astype(bool))
        return {
            "h2d_bytes": moved["h2d"],
            "d2h_bytes": moved["d2h"],
            "waited": sums.waited / 1e6,
            "moving": sums.moving / 1e6,
            "cold_bytes": self.steps[-1].cold_bytes,
            "overlapped": float(sums.unwaited / sums.moving) if sums.moving else None,
        }


def _column(rows: Sequence[object], name: str) -> np.ndarray:
    return np.array([getattr(row, name) for row in rows], np.float64)
