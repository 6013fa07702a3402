"""Limits of time for foreign code: a hook of a method, the import of a plugin.

A thread of this module counts how long a call takes, and then raises Hang in the thread of the call. Python delivers
the exception between two instructions; a signal (SIGURG) ends a system call of the main thread before. Code that
catches Hang, or that blocks in a system call of another thread, is interrupted again; after TRIES times the thread is
given up: its owner is told, or the command's process ends. Code that computes in C without releasing the interpreter
is not interrupted.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kvlens.interrupts import arrive, throw

T = TypeVar("T")
VARIABLE = "KVLENS_HOOK_SECONDS"
"""environment variable: seconds that a hook may take; 0: no limit"""
IMPORT_VARIABLE = "KVLENS_IMPORT_SECONDS"
"""the same of a plugin's import"""
LIMITS = {VARIABLE: 600.0, IMPORT_VARIABLE: 120.0}
"""seconds without the variable"""
TICK_S = 0.25
"""between two looks at the calls; a process that was stopped does not count"""
TRIES = 4
"""interruptions, a second apart, before a thread is given up"""


class Hang(BaseException):
    """A call took longer than its limit."""


def limit(variable: str = VARIABLE) -> float | None:
    """Return the seconds that a variable allows; None: no limit. Raises ValueError for what is no number."""
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else LIMITS[variable]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{variable}={text!r} is no number of seconds: set 0 for no limit, or unset it.")
    return seconds or None


@dataclass(eq=False)
class Watch:
    """Calls of one owner, one at a time, each within `seconds`."""

    seconds: float | None
    owner: str = ""
    """a method's name"""
    name: str = ""
    """of the call under way"""
    give_up: Callable[[str], None] | None = None
    """is told the name of a call whose thread cannot be interrupted; None: a command's process ends"""
    thread: int = 0
    running: bool = False
    ticks: float = 0.0
    """seconds of the call under way so far"""
    strikes: int = 0
    kept_by: threading.Thread | None = None
    """the keeper's thread that counts for it"""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str) -> None:
        """A call begins: Hang is raised in it once its time is over."""
        if self.seconds is None:
            return
        self.name, self.thread, self.ticks, self.strikes = name, threading.get_ident(), 0.0, 0
        self.running = True
        _keep(self)

    def end(self) -> None:
        """The call has ended, however. Raises Hang if its time is over and nobody has raised it yet."""
        try:
            self._stop()
        except Hang:  # it arrived here
            self._stop()
            raise

    def _stop(self) -> None:
        """Count no more, and let an interruption that has not arrived arrive here, without effect. Python cannot take
        it back: a request to do so leaves the thread looking for it for ever, and a tracer never goes on then."""
        with self.lock:
            self.running = False
        if self.strikes:
            try:  # noqa: SIM105 - suppress() is a function too, so it would arrive there
                arrive()
            except Hang:
                pass

    def tick(self, seconds: float) -> None:
        """Count time, and interrupt the call once its time is over. Called by the keeper."""
        assert self.seconds is not None
        with self.lock:
            if not self.running:
                return
            self.ticks += seconds
            if self.ticks < self.seconds + self.strikes:
                return
            self.strikes += 1
            if self.strikes <= TRIES:
                throw(self.thread, Hang)
                return
            self.running = False
        if self.give_up is not None:
            self.give_up(self.name)
        elif _command.ends is not None:
            _command.ends(self.owner, self.name)


class _Keeper:
    """The thread that counts, while there are watches."""

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def work(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            seconds, last = min(now - last, 2 * TICK_S), now
            with self.lock:
                watches = list(self.watches)
                if not watches:
                    self.thread = None
                    return
            while watches:  # holds no watch over the sleep
                watches.pop().tick(seconds)


class _Command:
    """How a command's process ends when a call cannot be interrupted; None in a process that is somebody else's."""

    def __init__(self) -> None:
        self.ends: Callable[[str, str], None] | None = None


_keeper, _command = _Keeper(), _Command()
_owners: dict[int, Callable[[str], None]] = {}
"""thread -> who is told when it is given up"""


@contextmanager
def abandoning(tell: Callable[[str], None]) -> Iterator[None]:
    """Let `tell` hear the name of a call of this thread that cannot be interrupted."""
    thread = threading.get_ident()
    _owners[thread] = tell
    try:
        yield
    finally:
        _owners.pop(thread, None)


def giving_up() -> Callable[[str], None] | None:
    """Return who is told when this thread is given up."""
    return _owners.get(threading.get_ident())


def _keep(watch: Watch) -> None:
    """Let the keeper count this watch. A forked process starts a keeper of its own."""
    thread = _keeper.thread
    if watch.kept_by is thread and thread is not None and thread.is_alive():
        return
    with _keeper.lock:
        _keeper.watches.add(watch)
        if _keeper.thread is None or not _keeper.thread.is_alive():
            _keeper.thread = threading.Thread(target=_keeper.work, name="kvlens-hangs", daemon=True)
            _keeper.thread.start()
        watch.kept_by = _keeper.thread


def end_process(sentence: Callable[[str, str], object]) -> None:
    """Let this process, a command's, end with a sentence on a call that cannot be interrupted. sentence: of the owner
    and the name of the call."""

    def end(owner: str, name: str) -> None:
        os.write(2, f"kvlens: {sentence(owner, name)}\n".encode())
        os._exit(1)

    _command.ends = end


def within(seconds: float | None, name: str, work: Callable[[], T]) -> T:
    """Return `work()`, made in a thread of its own that is left alone if it takes longer. Raises Hang, and what `work`
    raises."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make, name=f"kvlens-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        if thread.ident is not None:
            throw(thread.ident, Hang)
        raise Hang
    return answers[0]
