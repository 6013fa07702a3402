"""A link on the host that copies as a DMA engine is asked to, piece by contiguous piece, and counts what it wrote: the
dry run's stand-in for a profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvlens.link.host_link import Batch, Part, Pieces, Ticket
from kvlens.link.host_memory import HostMemory, Pageable
from kvlens.link.transfers import Entry, TransferLog
from kvlens.memory import memory


@dataclass
class Copied:
    """Bytes and copies of each direction, counted where they are made."""

    bytes: dict[str, int]
    copies: dict[str, int]


@dataclass
class _Done:
    entry: Entry

    def wait(self) -> None:
        """It was done when it was begun."""


class PieceLink:
    """See the module. Every job is done when `submit` or `bring` returns."""

    name = "host-copy, piece by piece"

    def __init__(self, copied: Copied) -> None:
        self.host: HostMemory = Pageable()
        self.host_wait_ns = 0
        self._copied = copied

    def submit(self, entry: Entry, moves: Sequence[Pieces]) -> Ticket:
        return self._copy(entry, (Part(move) for move in moves))

    def bring(self, entry: Entry, batch: Batch) -> Ticket:
        return self._copy(entry, batch.parts())

    def _copy(self, entry: Entry, parts: Iterator[Part]) -> Ticket:
        entry.start_ns = time.perf_counter_ns()
        for part in parts:
            for target, source in part.move.pieces():
                target.copy_(source)
                self._copied.bytes[entry.direction] += target.nbytes
                self._copied.copies[entry.direction] += 1
            if part.spread is not None:
                part.spread()
        entry.end_ns = time.perf_counter_ns()
        return _Done(entry)

    def resolve(self, step: int | None = None) -> None:
        """Times are written as copies are made."""

    def quiet(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """There is nothing to give back."""


@contextmanager
def piecewise() -> Iterator[Copied]:
    """Inside, every run's link is a PieceLink, and what is yielded counts for them all."""
    copied, make_link = Copied({"h2d": 0, "d2h": 0}, {"h2d": 0, "d2h": 0}), memory.link_for

    def link_for(device: torch.device, transfers: TransferLog) -> PieceLink:
        return PieceLink(copied)

    memory.link_for = link_for
    try:
        yield copied
    finally:
        memory.link_for = make_link
