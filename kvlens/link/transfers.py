"""The log of transfers between the tiers, and the names of the links: no byte moves without a line here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvlens.rows import CAUSES, TransferRow

if TYPE_CHECKING:
    import torch

HOST_LINK, CUDA_LINK = "host-copy", "pcie-dma"
"""names of the links"""


def link_name(device: torch.device) -> str:
    """Return the name of the link between a device and the cold tier."""
    return CUDA_LINK if device.type == "cuda" else HOST_LINK


@dataclass
class Entry:
    """What one copy moves, while it is under way: a line for each (layer, KV head, span), arrays int64 [n] in the order
    in which a trace lists them. All lines have the copy's times, perf_counter nanoseconds."""

    step: int
    layers: np.ndarray
    kv_heads: np.ndarray
    spans: np.ndarray
    sizes: np.ndarray
    """bytes of each line"""
    direction: str
    cause: str
    blocking: bool
    start_ns: int = 0
    end_ns: int = 0
    wait_ns: int = 0
    bytes: int = field(init=False)
    """of all lines"""

    def __post_init__(self) -> None:
        self.bytes = int(self.sizes.sum())

    def lines(self) -> Iterator[tuple[int, int, int, int]]:
        """(layer, KV head, span, bytes) of each."""
        return zip(*(x.tolist() for x in (self.layers, self.kv_heads, self.spans, self.sizes)), strict=True)

    def rows(self, zero_ns: int) -> list[TransferRow]:
        """A row for each line; the last one carries the waiting time."""
        start, end = ((time_ns - zero_ns) // 1000 for time_ns in (self.start_ns, self.end_ns))
        last, wait = len(self.sizes) - 1, self.wait_ns // 1000
        return [
            TransferRow(
                self.step,
                layer,
                kv_head,
                span,
                self.direction,
                self.cause,
                size,
                start,
                end,
                wait if line == last else 0,
                self.blocking,
            )
            for line, (layer, kv_head, span, size) in enumerate(self.lines())
        ]


class TransferLog:
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
        self,
        layers: npt.ArrayLike,
        kv_heads: npt.ArrayLike,
        spans: npt.ArrayLike,
        direction: str,
        cause: str,
        sizes: npt.ArrayLike,
        blocking: bool,
    ) -> Entry:
        """A new entry of the current step with a line for each (layer, KV head, span, bytes); what is the same for all
        lines may be given once. Raises ValueError for an unknown direction or cause."""
        if direction not in self.total or cause not in CAUSES:
            raise ValueError(f"unknown transfer {direction}/{cause}")
        columns = [np.atleast_1d(np.asarray(x, dtype=np.int64)) for x in (layers, kv_heads, spans, sizes)]
        lines = max(map(len, columns))
        layer, kv_head, span, size = (x if len(x) == lines else np.broadcast_to(x, lines) for x in columns)
        entry = Entry(self.step, layer, kv_head, span, size, direction, cause, blocking)
        self.total[direction] += entry.bytes
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
        finished: list[Entry] = []
        pending: list[Entry] = []
        for entry in self._open:  # looked at once: a copy may end meanwhile
            (finished if entry.end_ns and step in (None, entry.step) else pending).append(entry)
        self._open = pending
        return [row for entry in finished for row in entry.rows(self.zero_ns)]

    def discard(self) -> None:
        """Discard the rows of the copies that have ended; `total` stays."""
        self._open = [entry for entry in self._open if not entry.end_ns]
