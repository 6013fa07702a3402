"""The link between the tiers. On a CPU both tiers are host memory and a worker thread does real copies ('host-copy')."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvlens.memory.ledger import Entry


@dataclass(frozen=True)
class Move:
    """Copy `source` to `target`, or into its rows `index` along the last but one dimension."""

    target: torch.Tensor
    source: torch.Tensor
    index: torch.Tensor | None = None

    def run(self) -> None:
        if self.index is None:
            self.target.copy_(self.source)
        else:
            self.target.index_copy_(-2, self.index, self.source)

    @property
    def bytes(self) -> int:
        return self.source.numel() * self.source.element_size()


@dataclass
class Buffer:
    """A staging buffer that jobs take in turn: a copy into it waits until the job before has spread what was in it."""

    tensor: torch.Tensor
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))


class Ticket:
    """A job under way on the link. `wait` returns when it is done and adds the time stood still to its ledger entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> int:
        """Returns the nanoseconds stood still. Raises what the job raised."""
        waited = 0
        if not self._done.is_set():
            start = time.perf_counter_ns()
            self._done.wait()
            waited = time.perf_counter_ns() - start
            self.entry.wait_ns += waited
        if self._error is not None:
            raise self._error
        return waited


@dataclass(frozen=True)
class _Job:
    ticket: Ticket
    moves: Sequence[Move]
    then: Callable[[], None] | None
    buffer: Buffer | None


class HostLink:
    """A worker thread that copies in order, and a second one that spreads what came through a staging buffer while the next copy is
    under way. The CUDA tier will offer the same calls over streams and events."""

    name = "host-copy"

    def __init__(self) -> None:
        self._copies: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._spreads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._copy, name="kvlens-link", daemon=True)]
        self._threads[0].start()

    def submit(self, entry: Entry, moves: Sequence[Move], then: Callable[[], None] | None = None, buffer: Buffer | None = None) -> Ticket:
        """Queue the moves of one ledger entry; `then` (unpacking what arrived) runs after them, outside the entry's moving time: on
        the same thread, or with a `buffer` on the second one. Raises AssertionError when the moves' bytes are not the entry's, so
        that the ledger cannot lie."""
        moved = sum(move.bytes for move in moves)
        assert moved == entry.bytes, f"{moved} bytes moved, {entry.bytes} in the ledger"
        if buffer is not None and len(self._threads) == 1:
            self._threads.append(threading.Thread(target=self._spread, name="kvlens-spread", daemon=True))
            self._threads[1].start()
        ticket = Ticket(entry)
        self._copies.put(_Job(ticket, moves, then, buffer))
        return ticket

    def close(self) -> None:
        """Finish what is queued and stop the threads."""
        for jobs, thread in zip((self._copies, self._spreads), self._threads, strict=False):
            jobs.put(None)
            thread.join()

    def _copy(self) -> None:
        torch.set_num_threads(1)  # of this thread: small copies and products; waking a pool for each costs more than it saves
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
