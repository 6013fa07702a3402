"""Tells a person's Ctrl-C from a KeyboardInterrupt that foreign code raises by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Watch:
    """Whether SIGINT is watched now, and how many came since the watch began. One per process, as signals are."""

    def __init__(self) -> None:
        self.on = False
        self.count = 0


_watch = _Watch()


@contextmanager
def watched() -> Iterator[None]:
    """Count every SIGINT inside the block, then let its handler act as before. Only the main thread receives signals:
    in another thread the block changes nothing."""
    if threading.current_thread() is not threading.main_thread() or _watch.on:
        yield
        return
    handler = signal.getsignal(signal.SIGINT)

    def count(number: int, frame: FrameType | None) -> None:
        _watch.count += 1
        if callable(handler):
            handler(number, frame)

    if callable(handler):  # a signal that is ignored, as in a shell's background, interrupts nobody
        signal.signal(signal.SIGINT, count)
    _watch.on, _watch.count = handler is not None, 0
    try:
        yield
    finally:
        _watch.on = False
        if signal.getsignal(signal.SIGINT) is count:
            signal.signal(signal.SIGINT, handler)


def by_person() -> bool:
    """Return True if a KeyboardInterrupt raised now can be a person's: a SIGINT came, or nobody watches for one. In
    another thread than the main one it never is."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return not _watch.on or _watch.count > 0
