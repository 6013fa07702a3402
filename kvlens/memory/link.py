"""The link between the tiers. On a CPU both tiers are host memory and a worker thread does real copies ('host-copy')."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


class HostLink:
    """One worker thread that runs jobs in order. The CUDA tier will offer the same two calls over streams and events."""

    name = "host-copy"

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Ticket, Sequence[Move], Callable[[], None] | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kvlens-link", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry, moves: Sequence[Move], then: Callable[[], None] | None = None) -> Ticket:
        """Queue the moves of one ledger entry; `then` (unpacking what arrived) runs after them on the same thread, outside the
        entry's moving time. Raises AssertionError when the moves' bytes are not the entry's, so that the ledger cannot lie."""
        moved = sum(move.bytes for move in moves)
        assert moved == entry.bytes, f"{moved} bytes moved, {entry.bytes} in the ledger"
        ticket = Ticket(entry)
        self._queue.put((ticket, moves, then))
        return ticket

    def close(self) -> None:
        """Finish what is queued and stop the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: small copies and products; waking a pool for each costs more than it saves
        while (job := self._queue.get()) is not None:
            ticket, moves, then = job
            error: BaseException | None = None
            ticket.entry.start_ns = time.perf_counter_ns()
            try:
                with torch.inference_mode():
                    for move in moves:
                        move.run()
                    ticket.entry.end_ns = time.perf_counter_ns()
                    if then is not None:
                        then()
            except BaseException as caught:
                error = caught
                ticket.entry.end_ns = ticket.entry.end_ns or time.perf_counter_ns()
            ticket.finish(error)
