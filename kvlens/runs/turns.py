"""Threads of lanes that share one engine: whose turn it is, and the one thread that hears what they tell."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Turns:
    """A baton for as many threads as there are lanes. Who has it works; the others stand still until it comes."""

    def __init__(self, lanes: int) -> None:
        """The baton begins with lane 0."""
        self._has = [threading.Semaphore(1 if lane == 0 else 0) for lane in range(lanes)]
        self._going = [True] * lanes

    def wait(self, lane: int) -> None:
        """Until it is this lane's turn."""
        self._has[lane].acquire()

    def hand_on(self, lane: int) -> None:
        """To the next lane that is still going, and wait until it has come round again."""
        following = self._following(lane)
        if following != lane:
            self._has[following].release()
            self._has[lane].acquire()

    def leave(self, lane: int) -> None:
        """End this lane, whose turn it is; the next one goes on. Nothing happens if it has left before."""
        if not self._going[lane]:
            return
        following = self._following(lane)
        self._going[lane] = False
        if following != lane:
            self._has[following].release()

    def has_left(self, lane: int) -> bool:
        """Return True if this lane has left: its thread, which hung, must stop when it comes back."""
        return not self._going[lane]

    def _following(self, lane: int) -> int:
        """The next lane that is going; the lane itself where it is the last. Called by who has the baton."""
        lanes = len(self._going)
        return next((lane + ahead) % lanes for ahead in range(1, lanes + 1) if self._going[(lane + ahead) % lanes])


class Hearing:
    """Lanes tell what happens from threads of their own; whoever began them hears it on its own thread, in order."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.broken: Exception | None = None
        """what hearing something raised; nothing is heard from then on, and lanes should stop"""
        self._abandoned: set[int] = set()
        """threads that hang and are not waited for"""

    def tell(self, heard: Callable[..., None], *value: Any) -> None:
        """`heard(*what)` is called on the thread that hears. From any thread."""
        self._told.put((heard, value))

    def abandon(self, thread: int) -> None:
        """Wait for this lane's thread no longer. From any other thread."""
        self._abandoned.add(thread)
        self._told.put(None)

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """A thread for each, heard until all have ended. Raises what hearing them raised."""

        def begin(work: Callable[[], None]) -> None:
            try:
                work()
            finally:
                if threading.get_ident() not in self._abandoned:
                    self._told.put(None)

        for work in works:
            threading.Thread(target=begin, args=(work,), name="kvlens-lane", daemon=True).start()
        going = len(works)
        while going:
            lines = self._told.get()
            if lines is None:
                going -= 1
            elif self.broken is None:
                try:
                    lines[0](*lines[1])
                except Exception as error:
                    self.broken = error
        if self.broken is not None:
            raise self.broken
