"""The ledger: no byte moves between the tiers without a line here."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvlens.rows import CAUSES, TransferRow


@dataclass
class Entry:
    """A line of the ledger while its copy is under way. Times are perf_counter nanoseconds."""

    step: int
    layer: int
    kv_head: int | None
    span: int | None
    direction: str
    cause: str
    bytes: int
    blocking: bool
    start_ns: int = 0
    end_ns: int = 0
    wait_ns: int = 0


class Ledger:
    """Collects entries in the order they were opened; `drain` hands over the finished ones since the last call."""

    def __init__(self) -> None:
        self.zero_ns = time.perf_counter_ns()
        self.step = -1
        self.total: dict[str, int] = {"h2d": 0, "d2h": 0}
        self.opened: list[Entry] = []
        """entries opened since the step began"""
        self._open: list[Entry] = []
        self._waited: dict[int, int] = {}

    def start_step(self, step: int) -> None:
        self.step = step
        self.opened = []

    def open(
        self, layer: int, kv_head: int | None, span: int | None, direction: str, cause: str, size: int, blocking: bool
    ) -> Entry:
        """A new entry for `size` bytes of the current step. Raises ValueError for an unknown direction or cause."""
        if direction not in self.total or cause not in CAUSES:
            raise ValueError(f"unknown transfer {direction}/{cause}")
        entry = Entry(self.step, layer, kv_head, span, direction, cause, size, blocking)
        self.total[direction] += size
        self._open.append(entry)
        self.opened.append(entry)
        return entry

    def stood_still(self, entry: Entry, step: int, ns: int) -> None:
        """The model's work stood still during `step` until this entry's copy was done."""
        entry.wait_ns += ns
        self._waited[step] = self._waited.get(step, 0) + ns

    def waited_ns(self, step: int) -> int:
        """How long the model's work stood still for copies during a step, as far as it is known by now."""
        return self._waited.get(step, 0)

    def drain(self, step: int | None = None) -> list[TransferRow]:
        """Rows of the finished copies (of one step), in the order they were opened; the others stay until the next
        call."""
        done = [e for e in self._open if e.end_ns and step in (None, e.step)]
        self._open = [e for e in self._open if not (e.end_ns and step in (None, e.step))]
        return [
            TransferRow(
                e.step,
                e.layer,
                e.kv_head,
                e.span,
                e.direction,
                e.cause,
                e.bytes,
                (e.start_ns - self.zero_ns) // 1000,
                (e.end_ns - self.zero_ns) // 1000,
                e.wait_ns // 1000,
                e.blocking,
            )
            for e in done
        ]
