"""One copy between the tiers, and how it is made of copies of contiguous memory, which is all that a DMA engine is
asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from kvlens.kernels.token_gather import gather_tokens

Piece = tuple[torch.Tensor, torch.Tensor]
"""(target, source)"""


@dataclass(frozen=True)
class Move:
    """Copy `source` to `target`, or into its rows `rows` (int64 [n], numbers that the host knows) along the first
    dimension."""

    target: torch.Tensor
    source: torch.Tensor
    rows: np.ndarray | None = None

    def run(self) -> None:
        """At once, by who can read and write both sides. Raises RuntimeError where the shapes do not fit."""
        if self.rows is None:
            self.target.copy_(self.source)
        elif _consecutive(self.rows):
            self.target.narrow(0, int(self.rows[0]), len(self.rows)).copy_(self.source)
        else:
            self.target.index_copy_(0, torch.from_numpy(self.rows), self.source)

    def pieces(self) -> Iterator[Piece]:
        """The same copy as contiguous pieces (target, source): consecutive rows are one piece. Raises RuntimeError
        where the shapes do not fit, before anything is copied."""
        if self.rows is None:
            return _contiguous(self.target, self.source)
        if self.source.shape != (len(self.rows), *self.target.shape[1:]):
            raise RuntimeError(
                f"a copy of {tuple(self.source.shape)} cannot go into {len(self.rows)} rows of "
                f"{tuple(self.target.shape)}"
            )
        return (
            piece
            for start, count in _runs(self.rows)
            for piece in _contiguous(
                self.target.narrow(0, int(self.rows[start]), count), self.source.narrow(0, start, count)
            )
        )

    @property
    def bytes(self) -> int:
        return self.source.numel() * self.source.element_size()


@dataclass(frozen=True)
class Tokens:
    """Keys and values of n tokens out of a pool of rows into slots. keys, values [H_kv, C, D]; pool [R, D]: the keys of
    token i are row `rows[i]` of it, its values the one `behind` rows later; they go to slot `slots[i]` of KV head
    `heads[i]`. All int64 [n]."""

    keys: torch.Tensor
    values: torch.Tensor
    pool: torch.Tensor
    rows: np.ndarray
    behind: int
    heads: np.ndarray
    slots: np.ndarray

    def run(self) -> None:
        heads, slots, rows = (torch.from_numpy(x) for x in (self.heads, self.slots, self.rows))
        self.keys[heads, slots] = self.pool.index_select(0, rows)
        self.values[heads, slots] = self.pool.index_select(0, rows + self.behind)

    def pieces(self) -> Iterator[Piece]:
        """Tokens of a KV head that lie one after the other on both sides are one piece."""
        for number, count in self._stretches():
            head, slot, row = int(self.heads[number]), int(self.slots[number]), int(self.rows[number])
            for side, row_start in ((self.keys, row), (self.values, row + self.behind)):
                yield from _contiguous(side[head].narrow(0, slot, count), self.pool.narrow(0, row_start, count))

    def count_pieces(self) -> int:
        """How many pieces there are, without making them."""
        return 2 * sum(1 for _ in self._stretches())

    def gathered(self) -> Callable[[], None]:
        """The same copy as one launch on the device, which reads the pool in place. The list of tokens is on its way to
        the device when this returns."""
        rows = torch.from_numpy(np.stack((self.rows, self.heads, self.slots))).to(self.keys.device)
        return partial(gather_tokens, self.pool, self.behind, rows, self.keys, self.values)

    def _stretches(self) -> Iterator[tuple[int, int]]:
        return _runs(self.slots, self.slots + self.heads * self.keys.shape[1], self.rows)

    @property
    def bytes(self) -> int:
        return 2 * len(self.rows) * self.pool.shape[1] * self.pool.element_size()


@dataclass(frozen=True)
class Numbers:
    """Stretches of a flat pool, one after the other, into `target` [N]: `begins`, `count` int64 [n] of each."""

    target: torch.Tensor
    pool: torch.Tensor
    begins: np.ndarray
    count: np.ndarray

    def run(self) -> None:
        within = np.arange(self.count.sum()) - np.repeat(self.count.cumsum() - self.count, self.count)
        index = torch.from_numpy(np.repeat(self.begins, self.count) + within)
        torch.index_select(self.pool, 0, index, out=self.target)

    @property
    def bytes(self) -> int:
        return int(self.count.sum()) * self.pool.element_size()


def _contiguous(target: torch.Tensor, source: torch.Tensor) -> Iterator[Piece]:
    if target.shape != source.shape:
        raise RuntimeError(f"a copy of {tuple(source.shape)} cannot go into {tuple(target.shape)}")
    if source.dim() == 0 or (target.is_contiguous() and source.is_contiguous()):
        return iter(((target, source),))
    return (piece for pair in zip(target, source, strict=True) for piece in _contiguous(*pair))


def _consecutive(rows: np.ndarray) -> bool:
    return len(rows) > 0 and bool((np.diff(rows) == 1).all())


def _runs(*rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where every one of `rows` [n] counts up by one: (place of the first, how many)."""
    breaks = np.flatnonzero(np.any([np.diff(row) != 1 for row in rows], axis=0)) + 1
    edges = [0, *breaks.tolist(), len(rows[0])]
    return ((start, end - start) for start, end in pairwise(edges) if end > start)


class Mark(Protocol):
    """A place in a stream. It is reached when everything issued there before it is done."""

    def reached(self) -> bool:
        """Asks, without waiting."""

    def synchronize(self) -> None:
        """The host waits until it is reached."""

    def elapsed_ns(self, later: Mark) -> int:
        """Nanoseconds from this mark to another; both timed and reached."""


class Stream(Protocol):
    """Work that runs in the order in which it was issued, beside the host and the other streams."""

    def mark(self, timed: bool = False) -> Mark:
        """A mark behind everything issued so far."""

    def wait(self, mark: Mark) -> None:
        """What is issued here from now on begins when `mark` is reached. The host goes on at once."""

    def run(self, work: Callable[[], None]) -> None:
        """Issue the work here. The host goes on at once."""

    def synchronize(self) -> None:
        """The host waits until everything issued here is done."""


@dataclass(frozen=True)
class Streams:
    """compute: where the model runs; h2d, d2h: copies to and from the device; spread: what came through a staging
    buffer goes to its slots while the next copy arrives in the other buffer."""

    compute: Stream
    h2d: Stream
    d2h: Stream
    spread: Stream


class CudaMark:
    """A CUDA event, recorded."""

    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)
        self.event.record(stream)

    def reached(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_ns(self, later: Mark) -> int:
        assert isinstance(later, CudaMark)
        return round(self.event.elapsed_time(later.event) * 1e6)


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def mark(self, timed: bool = False) -> CudaMark:
        return CudaMark(self._stream, timed)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def synchronize(self) -> None:
        self._stream.synchronize()


def cuda_streams(device: torch.device) -> Streams:
    """The stream that the device's work is issued to now is the model's; the others are new."""
    current = torch.cuda.current_stream(device)
    return Streams(CudaStream(current), *(CudaStream(torch.cuda.Stream(device)) for _ in range(3)))
