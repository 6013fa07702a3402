"""The link to a CUDA device: copies of its DMA engines between pinned memory and the device, on streams of their own,
ordered by events.

Three rules, one line each below, and nothing else orders anything:
1. a copy begins after everything that the model's stream was given before it: the slots it overwrites have been read,
   what it reads has been computed;
2. a copy into a staging buffer begins after the job before has spread what was in it;
3. the model's stream goes on after what it waits for. The host does not wait with it.

Tokens that lie scattered are fetched by one launch that reads the pinned memory in place, on the same streams and by
the same rules: a copy costs the host some microseconds, and a step may ask for a thousand of single tokens.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch

from kvlens.kernels.token_gather import fits
from kvlens.link.copies import Mark, Piece, Stream, Streams, Tokens, cuda_streams
from kvlens.link.host_link import Batch, Part, Pieces, Ticket, check
from kvlens.link.host_memory import HostMemory, cuda_pinned
from kvlens.link.transfers import CUDA_LINK, Entry, TransferLog

REBASE_NS = 10_000_000_000
"""CUDA gives the time between two events as a float of milliseconds: beyond this distance microseconds get lost, so a
nearer event becomes the one that times are counted from"""


GATHERED_FROM = 16
"""pieces from which tokens are fetched by one launch"""
_gathered_from: ContextVar[float] = ContextVar("gathered_from", default=GATHERED_FROM)


@contextlib.contextmanager
def copying_piecewise() -> Iterator[None]:
    """Inside, DMA engines make all copies: a profiler sees the bytes of each."""
    token = _gathered_from.set(math.inf)
    try:
        yield
    finally:
        _gathered_from.reset(token)


class _CudaTicket:
    def __init__(self, link: CudaLink, entry: Entry) -> None:
        self.entry, self._link = entry, link
        self.stream: Stream | None = None
        self.turn = 0
        """how many jobs ended on `stream` up to this one"""
        self.done: Mark | None = None
        self.error: Exception | None = None

    def wait(self) -> None:
        self._link.await_ticket(self)


@dataclass(frozen=True)
class _Timed:
    """Two timed marks around an entry's copy, or around a wait of the model's stream for it during `step`."""

    entry: Entry
    start: Mark
    end: Mark
    step: int = 0


class CudaLink:
    """See the module. Copies into slots go straight there, a piece for each run of tokens that lie one after the other
    on both sides; copies to the host are a piece for each run of consecutive rows."""

    name = CUDA_LINK

    def __init__(self, transfers: TransferLog, streams: Streams, host: HostMemory) -> None:
        self._transfers, self._streams, self.host = transfers, streams, host
        self.host_wait_ns = 0
        self._copies: list[_Timed] = []
        self._waits: list[_Timed] = []
        self._turns: dict[int, int] = {}
        """jobs that ended on a stream so far, by the stream's id()"""
        self._waited: dict[int, int] = {}
        """how many of them the model's stream has waited for"""
        self._kept: list[tuple[Mark, object]] = []
        """what jobs under way read and write: its memory must not be given to others before their marks are reached"""
        self._base = streams.compute.mark(timed=True)
        self._base.synchronize()
        self._base_ns = time.perf_counter_ns()

    def submit(self, entry: Entry, moves: Sequence[Pieces]) -> Ticket:
        return self._begin(entry, [Part(move) for move in moves])

    def bring(self, entry: Entry, batch: Batch) -> Ticket:
        return self._begin(entry, list(batch.parts()))

    def _begin(self, entry: Entry, parts: Sequence[Part]) -> Ticket:
        """One job. Its time is that from the beginning of its first copy to the end of its last one."""
        check(entry, sum(part.move.bytes for part in parts))
        streams = self._streams
        side = last = streams.d2h if entry.direction == "d2h" else streams.h2d
        ticket = _CudaTicket(self, entry)
        self._release()
        works: list[Callable[[], None]] = []
        try:
            works += [_work(part.move) for part in parts]
            issued = streams.compute.mark()
            side.wait(issued)  # rule 1
            start = end = None
            for part, work in zip(parts, works, strict=True):
                if part.buffer is not None and part.buffer.spread is not None:
                    side.wait(part.buffer.spread)  # rule 2
                start = start or side.mark(timed=True)
                side.run(work)
                end = side.mark(timed=True)
                if part.spread is not None and part.buffer is None:
                    side.run(part.spread)
                elif part.spread is not None:
                    last = self._spread(part, issued, end)
            if last is not side:
                last.wait(side.mark())
            if start is not None and end is not None:
                self._copies.append(_Timed(entry, start, end))
        except Exception as caught:  # raised to who waits, as with a thread
            ticket.error = caught
        ticket.stream, ticket.done = last, last.mark()
        ticket.turn = self._turns[id(last)] = self._turns.get(id(last), 0) + 1
        self._kept.append((ticket.done, (parts, works)))
        return ticket

    def _spread(self, part: Part, issued: Mark, copied: Mark) -> Stream:
        """What came into a buffer goes on to its slots, beside the next copy."""
        assert part.spread is not None
        assert part.buffer is not None
        stream = self._streams.spread
        stream.wait(issued)  # rule 1
        stream.wait(copied)
        stream.run(part.spread)
        part.buffer.spread = stream.mark()
        return stream

    def await_ticket(self, ticket: _CudaTicket) -> None:
        """The model's stream waits for the job, unless it has waited for a later one of the same stream."""
        assert ticket.done is not None
        if ticket.turn > self._waited.get(id(ticket.stream), 0):
            compute = self._streams.compute
            wait_start = compute.mark(timed=True)
            compute.wait(ticket.done)  # rule 3
            self._waits.append(_Timed(ticket.entry, wait_start, compute.mark(timed=True), self._transfers.step))
            self._waited[id(ticket.stream)] = ticket.turn
        if ticket.error is not None:
            raise ticket.error

    def resolve(self, step: int | None = None) -> None:
        """Reads the events of the copies of steps up to `step`, and of the waits for them. When the host has seen a
        later step's logits they are all reached; else the host waits here."""
        due, self._copies = _split(self._copies, step)
        for timed in due:
            self._reach(timed.end)
            timed.entry.start_ns = self._base_ns + self._base.elapsed_ns(timed.start)
            timed.entry.end_ns = timed.entry.start_ns + timed.start.elapsed_ns(timed.end)
            if timed.entry.end_ns - self._base_ns > REBASE_NS:
                self._base, self._base_ns = timed.end, timed.entry.end_ns
        self._release()
        due, self._waits = _split(self._waits, step)
        for timed in due:
            self._reach(timed.end)
            self._transfers.stood_still(timed.entry, timed.step, timed.start.elapsed_ns(timed.end))

    def quiet(self) -> None:
        start_ns = time.perf_counter_ns()
        for stream in (self._streams.d2h, self._streams.h2d, self._streams.spread, self._streams.compute):
            stream.synchronize()
        self.host_wait_ns += time.perf_counter_ns() - start_ns
        self._release()

    def close(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # a device in an error state: what it said has been raised where it was waited for
            self.quiet()
        with contextlib.suppress(RuntimeError):
            self.host.close()

    def _release(self) -> None:
        """Let go of what the oldest jobs held, as far as they have ended."""
        ended = 0
        while ended < len(self._kept) and self._kept[ended][0].reached():
            ended += 1
        del self._kept[:ended]

    def _reach(self, mark: Mark) -> None:
        if not mark.reached():
            start_ns = time.perf_counter_ns()
            mark.synchronize()
            self.host_wait_ns += time.perf_counter_ns() - start_ns


def _work(move: Pieces) -> Callable[[], None]:
    """Return what a stream runs to make the copy. Raises RuntimeError where the shapes do not fit."""
    if isinstance(move, Tokens) and fits(move.pool.shape[1]) and move.count_pieces() >= _gathered_from.get():
        return move.gathered()
    return partial(_copy, list(move.pieces()))


def _copy(pieces: Sequence[Piece]) -> None:
    for target, source in pieces:
        target.copy_(source, non_blocking=True)


def _split(timed: list[_Timed], step: int | None) -> tuple[list[_Timed], list[_Timed]]:
    """(those whose entries belong to steps up to `step`, the others)."""
    due = [wait for wait in timed if step is None or wait.entry.step <= step]
    return due, [wait for wait in timed if step is not None and wait.entry.step > step]


def cuda_link(device: torch.device, transfers: TransferLog) -> CudaLink:
    """Return the link between a CUDA device and pinned host memory."""
    return CudaLink(transfers, cuda_streams(device), cuda_pinned(device))
