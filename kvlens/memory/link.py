"""The link between the tiers, behind one interface. On a CPU both tiers are host memory and a worker thread does real
copies ('host-copy'); behind a CUDA device they are copies of its DMA engines ('pcie-dma', kvlens/memory/cudalink.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvlens.memory.ledger import Entry, Ledger
from kvlens.memory.move import Move
from kvlens.memory.pinned import HostMemory, Pageable
from kvlens.memory.streams import Mark


@dataclass
class Buffer:
    """A staging buffer that jobs take in turn: a copy into it waits until the job before has spread what was in it. A
    link of threads waits for `free`, one of streams for the mark `spread`."""

    tensor: torch.Tensor
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    spread: Mark | None = None


class Ticket(Protocol):
    """A job under way on the link."""

    entry: Entry

    def wait(self) -> None:
        """The model's work goes on when the job is done; how long it stood still gets into the ledger. Raises what the
        job raised."""


class Link(Protocol):
    """Copies between the tiers, each with its entry in the ledger. `host`: the memory that the cold tier has to lie
    in."""

    name: str
    host: HostMemory
    host_wait_ns: int
    """how long the host waited without the model's work having to"""

    def submit(
        self, entry: Entry, moves: Sequence[Move], then: Callable[[], None] | None = None, buffer: Buffer | None = None
    ) -> Ticket:
        """Begin the moves of one ledger entry; `then` (unpacking what arrived) follows them, outside the entry's moving
        time, and with a `buffer` beside the next copy. Raises AssertionError when the moves' bytes are not the entry's,
        so that the ledger cannot lie."""

    def submit_together(self, jobs: Sequence[tuple[Entry, Move]]) -> list[Ticket]:
        """Begin the moves of entries of one direction, one each, that are waited for together. A link may carry several
        in one copy, whose times are then the times of each of them. Raises as `submit`."""

    def resolve(self, step: int | None = None) -> None:
        """Copies begun up to `step` (None: ever) have their times in the ledger afterwards."""

    def quiet(self) -> None:
        """The host waits until everything that was submitted has ended: it may read what was copied."""

    def close(self) -> None:
        """Finish what was submitted and give back threads and memory. Raises nothing."""


class _HostTicket:
    def __init__(self, entry: Entry, ledger: Ledger) -> None:
        self.entry, self._ledger = entry, ledger
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
            self._ledger.stood_still(self.entry, self._ledger.step, time.perf_counter_ns() - start)
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class _Job:
    ticket: _HostTicket
    moves: Sequence[Move]
    then: Callable[[], None] | None
    buffer: Buffer | None


class HostLink:
    """A worker thread that copies in order, and a second one that spreads what came through a staging buffer while the
    next copy is under way."""

    name = "host-copy"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.host: HostMemory = Pageable()
        self.host_wait_ns = 0
        self._last: dict[bool, _HostTicket] = {}
        """the newest job without a buffer, and the newest with one"""
        self._copies: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._spreads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._copy, name="kvlens-link", daemon=True)]
        self._threads[0].start()

    def submit(
        self, entry: Entry, moves: Sequence[Move], then: Callable[[], None] | None = None, buffer: Buffer | None = None
    ) -> Ticket:
        check(entry, moves)
        if buffer is not None and len(self._threads) == 1:
            self._threads.append(threading.Thread(target=self._spread, name="kvlens-spread", daemon=True))
            self._threads[1].start()
        ticket = self._last[buffer is not None] = _HostTicket(entry, self._ledger)
        self._copies.put(_Job(ticket, moves, then, buffer))
        return ticket

    def submit_together(self, jobs: Sequence[tuple[Entry, Move]]) -> list[Ticket]:
        return [self.submit(entry, [move]) for entry, move in jobs]

    def resolve(self, step: int | None = None) -> None:
        """The threads write times into the entries themselves."""

    def quiet(self) -> None:
        for ticket in self._last.values():
            ticket.ended()

    def close(self) -> None:
        for jobs, thread in zip((self._copies, self._spreads), self._threads, strict=False):
            jobs.put(None)
            thread.join()

    def _copy(self) -> None:
        torch.set_num_threads(
            1
        )  # of this thread: small copies and products; waking a pool for each costs more than it saves
        while (job := self._copies.get()) is not None:
            if job.buffer is not None:
                job.buffer.free.acquire()
            entry, error = job.ticket.entry, None
            entry.start_ns = time.perf_counter_ns()
            try:
                with torch.inference_mode():
                    for move in job.moves:
                        move.run()
                    entry.end_ns = time.perf_counter_ns()
                    if job.buffer is None and job.then is not None:
                        job.then()
            except BaseException as caught:
                error = caught
                entry.end_ns = entry.end_ns or time.perf_counter_ns()
            if job.buffer is not None and error is None:
                self._spreads.put(job)
                continue
            if job.buffer is not None:
                job.buffer.free.release()
            job.ticket.finish(error)

    def _spread(self) -> None:
        torch.set_num_threads(1)
        while (job := self._spreads.get()) is not None:
            error = None
            try:
                with torch.inference_mode():
                    if job.then is not None:
                        job.then()
            except BaseException as caught:
                error = caught
            assert job.buffer is not None
            job.buffer.free.release()
            job.ticket.finish(error)


def check(entry: Entry, moves: Sequence[Move]) -> None:
    """Raises AssertionError when the moves' bytes are not the entry's."""
    moved = sum(move.bytes for move in moves)
    assert moved == entry.bytes, f"{moved} bytes moved, {entry.bytes} in the ledger"


def link_for(device: torch.device, ledger: Ledger) -> Link:
    """The link between `device` and the cold tier."""
    if device.type != "cuda":
        return HostLink(ledger)
    from kvlens.memory.cudalink import cuda_link

    return cuda_link(device, ledger)


def link_name(device: torch.device) -> str:
    """What `link_for` would make, by its name."""
    from kvlens.memory.cudalink import CudaLink

    return CudaLink.name if device.type == "cuda" else HostLink.name
