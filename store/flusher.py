"""The second thread of a writer: it takes what is handed over, in order, and writes it to the trace."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from kvlens.store.blocks import Block
from kvlens.store.errors import TraceError
from kvlens.store.tracefile import Job, TraceFile

_HEARTBEAT_S = 2.0
_BLOCKS = 3


class Flusher:
    """Owns the blocks that steps are copied into: each is with the engine's thread, in the queue, or free."""

    def __init__(self, trace_level: str) -> None:
        self.trace_level = trace_level
        self.error: TraceError | None = None
        """why nothing more is written; whoever hands over looks at it"""
        self.stored = 0
        """steps that survive the process"""
        self.stalls = 0
        """how often the engine's thread had to wait for this one"""
        self.free: queue.Queue[Block] = queue.Queue()
        self._work: queue.Queue[Job | None] = queue.Queue()
        self._blocks_made = 0
        self._thread: threading.Thread | None = None

    def start(
        self, file: TraceFile, name: str, describe: Callable[[BaseException], TraceError], beat: Callable[[], None]
    ) -> None:
        """Begin to write to `file`. describe: an error of the disk or of a record as the run's own; beat: called every
        two seconds of a run without an error, from this thread. Only the thread holds the two, as long as it runs: the
        writer is then freed without a garbage collection."""
        self._thread = threading.Thread(target=self._loop, args=(file, describe, beat), name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Hand over one job; never waits."""
        self._work.put(job)

    def block(self, make: Callable[[], Block], check: Callable[[], None]) -> Block:
        """A block to fill: a new one of `make` while there are few, else one that was written. Waits for the disk only
        where all are in the queue, and calls `check` meanwhile, which raises when nothing will come."""
        if self._blocks_made < _BLOCKS and self.free.empty():
            self._blocks_made += 1
            return make()
        with contextlib.suppress(queue.Empty):
            return self.free.get_nowait()
        self.stalls += 1
        while True:
            try:
                return self.free.get(timeout=0.5)
            except queue.Empty:
                check()

    def stop(self) -> bool:
        """Write what was handed over and end the thread -> whether there was one to end."""
        if self._thread is None or not self._thread.is_alive():
            return False
        self._work.put(None)
        self._thread.join()
        return True

    def _loop(self, file: TraceFile, describe: Callable[[BaseException], TraceError], beat: Callable[[], None]) -> None:
        last_beat = time.monotonic()
        while True:
            try:
                job = self._work.get(timeout=_HEARTBEAT_S)
                if job is None:
                    return
                if self.error is None:
                    file.flush(job, self.trace_level)
                    self.stored += job.n if isinstance(job, Block) else 0
                if isinstance(job, Block):
                    job.reset()
                    self.free.put(job)
            except queue.Empty:
                pass
            except BaseException as error:
                self.error = describe(error)
            finally:
                job = None  # or it lasts until the next comes
            if self.error is None and time.monotonic() - last_beat > _HEARTBEAT_S:
                last_beat = time.monotonic()
                with contextlib.suppress(Exception):  # only a display; the trace itself is what must not fail
                    beat()
