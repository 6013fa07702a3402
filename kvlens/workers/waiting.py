"""Groups of items that wait for a worker, and items that a dead worker left."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

MOST_DEATHS = 2
"""an item whose workers died this often is not handed out again"""


class WaitingGroups:
    """Groups that no worker has ended yet. A worker without a group waits, since another worker may die and leave its
    group. Used by the threads of all workers."""

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        self._waiting = deque(groups)
        self._running = 0
        self._deaths: Counter[Any] = Counter()
        self._closed = False
        self._changed = threading.Condition()

    def take(self) -> Sequence[Any] | None:
        """Return the next group, waiting for one while other workers have groups; None if none can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._running or self._closed)
            if self._closed or not self._waiting:
                return None
            self._running += 1
            return self._waiting.popleft()

    def end(self) -> None:
        """A worker has ended its group."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def give_back(self, items: Sequence[Any]) -> bool:
        """Hand out again what a dead worker left, the item that it was in last. Return False where that item is not
        handed out again; the items after it are."""
        with self._changed:
            self._running -= 1
            self._deaths[items[0]] += 1
            again = self._deaths[items[0]] < MOST_DEATHS
            if len(items) > 1:
                self._waiting.appendleft(items[1:])
            if again:  # last: what kills one worker may kill all
                self._waiting.append(items[:1])
            self._changed.notify_all()
            return again

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def empty(self) -> bool:
        """Every group was ended."""
        with self._changed:
            return not self._waiting and not self._running
