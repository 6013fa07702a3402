"""The link between the tiers, behind one interface. On a CPU both tiers are host memory and a worker thread does real
copies ('host-copy'); behind a CUDA device they are copies of its DMA engines ('pcie-dma', kvlens/link/cuda_link.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch

from kvlens.link.copies import Mark, Piece
from kvlens.link.host_memory import HostMemory, Pageable
from kvlens.link.transfers import HOST_LINK, Entry, TransferLog


@dataclass
class Buffer:
    """A staging buffer that copies take in turn: one into it waits until what was in it has been spread."""

    tensor: torch.Tensor
    spread: Mark | None = None


class Stage:
    """Staging buffers, which units take in turn. streamed: all units pass through them, and one is filled while the
    other is spread."""

    def __init__(self, buffers: Sequence[Buffer], streamed: bool) -> None:
        self.buffers, self.streamed, self._turns = buffers, streamed, count()

    def next(self) -> Buffer:
        """Return the buffer that has waited longest."""
        return self.buffers[next(self._turns) % len(self.buffers)]


class Moving(Protocol):
    """A copy that the host can make at once."""

    def run(self) -> None: ...

    @property
    def bytes(self) -> int: ...


class Pieces(Moving, Protocol):
    """A copy that is also told as contiguous pieces."""

    def pieces(self) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class Part:
    """One copy of a batch for a link that needs contiguous memory: `spread` brings what came to where it is attended;
    with a `buffer` it does so beside the next copy."""

    move: Pieces
    spread: Callable[[], None] | None = None
    buffer: Buffer | None = None


class Batch(Protocol):
    """Many units on their way to the device as one entry of the transfer log, told in two ways that come to the same
    bits."""

    def whole(self) -> tuple[Sequence[Moving], Callable[[], None] | None]:
        """All of them at once, for a link whose two sides are one memory, and what follows outside the moving time."""

    def parts(self) -> Iterator[Part]:
        """Copy by copy, through staging buffers where the layout has them."""


class Ticket(Protocol):
    """A job under way on the link."""

    entry: Entry

    def wait(self) -> None:
        """The model's work goes on when the job is done; how long it stood still gets into the transfer log.
        Raises what the job raised."""


class Link(Protocol):
    """Copies between the tiers, each with its entry in the transfer log. `host`: the memory that the cold tier has to
    lie in."""

    name: str
    host: HostMemory
    host_wait_ns: int
    """how long the host waited without the model's work having to"""

    def submit(self, entry: Entry, moves: Sequence[Pieces]) -> Ticket:
        """Begin the moves of one entry of the transfer log. Raises AssertionError when the moves' bytes are not the
        entry's, so that the log cannot lie."""

    def bring(self, entry: Entry, batch: Batch) -> Ticket:
        """Begin a batch of one entry of the transfer log. Raises as `submit`."""

    def resolve(self, step: int | None = None) -> None:
        """Copies begun up to `step` (None: ever) have their times in the transfer log afterwards."""

    def quiet(self) -> None:
        """The host waits until everything that was submitted has ended: it may read what was copied."""

    def close(self) -> None:
        """Finish what was submitted and give back threads and memory. Raises nothing."""


class _HostTicket:
    def __init__(self, entry: Entry, transfers: TransferLog) -> None:
        self.entry, self._transfers = entry, transfers
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def ended(self) -> None:
        """Returns when the job has ended, whatever came of it."""
        self._done.wait()

    def wait(self) -> None:
        if not self._done.is_set():
            start = time.perf_counter_ns()
            self._done.wait()
            self._transfers.stood_still(self.entry, self._transfers.step, time.perf_counter_ns() - start)
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class _Job:
    ticket: _HostTicket
    moves: Sequence[Moving]
    then: Callable[[], None] | None


class HostLink:
    """A worker thread that copies in order. Both tiers are host memory here, so nothing goes through a staging
    buffer."""

    name = HOST_LINK

    def __init__(self, transfers: TransferLog) -> None:
        self._transfers = transfers
        self.host: HostMemory = Pageable()
        self.host_wait_ns = 0
        self._newest: _HostTicket | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy, name="kvlens-link", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry, moves: Sequence[Pieces]) -> Ticket:
        return self._begin(entry, moves, None)

    def bring(self, entry: Entry, batch: Batch) -> Ticket:
        return self._begin(entry, *batch.whole())

    def _begin(self, entry: Entry, moves: Sequence[Moving], then: Callable[[], None] | None) -> Ticket:
        check(entry, sum(move.bytes for move in moves))
        self._newest = ticket = _HostTicket(entry, self._transfers)
        self._jobs.put(_Job(ticket, moves, then))
        return ticket

    def resolve(self, step: int | None = None) -> None:
        """The thread writes times into the entries itself."""

    def quiet(self) -> None:
        if self._newest is not None:
            self._newest.ended()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _copy(self) -> None:
        # of this thread: small copies and products; waking a pool for each costs more than it saves
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            entry, error = job.ticket.entry, None
            entry.start_ns = time.perf_counter_ns()
            try:
                with torch.inference_mode():
                    for move in job.moves:
                        move.run()
                    entry.end_ns = time.perf_counter_ns()
                    if job.then is not None:
                        job.then()
            except BaseException as caught:
                error = caught
                entry.end_ns = entry.end_ns or time.perf_counter_ns()
            job.ticket.finish(error)


def check(entry: Entry, moved: int) -> None:
    """Raises AssertionError when so many bytes are not the entry's."""
    assert moved == entry.bytes, f"{moved} bytes moved, {entry.bytes} in the transfer log"
