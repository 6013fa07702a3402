"""Tells a person's Ctrl-C from a KeyboardInterrupt that foreign code raises by itself; raises an exception in another
thread. Python delivers that one between two instructions, and a signal (SIGURG) ends a system call of the main thread
before (kvlens.hangs)."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def arrive() -> None:
    """Do nothing: an exception that waits for this thread is raised when a function begins."""


def throw(thread: int, error: type[BaseException]) -> None:
    """Raise `error` in a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
    if thread == threading.main_thread().ident and signal.getsignal(signal.SIGURG) is _wake:
        with suppress(OSError):
            signal.pthread_kill(thread, signal.SIGURG)
    _settle()


class _Settled(BaseException):
    """Raised in a thread that throws something into another one, and caught there."""


def _settle() -> None:
    """Take back the flag by which the interpreter tells that some thread is to raise something; a thread that wakes
    raises it again for itself. One that sleeps for ever would leave it: in CPython 3.11 every thread that is traced or
    profiled then stands still where its next function begins."""
    with suppress(_Settled):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Settled))
        arrive()


def _wake(number: int, frame: FrameType | None) -> None:
    """Run as a handler of a signal: the exception arrives here."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Hang end system calls of the main thread in the block. It changes nothing in other threads, and where the
    signal has a handler of somebody else."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGURG) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGURG, _wake)
    try:
        yield
    finally:
        signal.signal(signal.SIGURG, signal.SIG_DFL)
