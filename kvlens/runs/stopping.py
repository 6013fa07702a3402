"""How a person stops a run: the first signal asks it to end after the current step, the second ends the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_received: list[int] = []
"""signals that `stop_signals` has heard, in order"""


def stop_signals() -> Callable[[], bool]:
    """Listen to SIGINT and SIGTERM for the rest of the process. The returned function returns True after the first
    signal; a second signal raises KeyboardInterrupt."""
    event = threading.Event()
    _received.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _handler(event, _received.append))
    return event.is_set


def exit_status(status: int) -> int:
    """Return the exit status of a command that would end with `status`: 128 and the first signal's number where the
    command failed, or was interrupted, and a signal had asked it to stop."""
    return 128 + _received[0] if status in (1, 128 + signal.SIGINT) and _received else status


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Listen to SIGINT inside the block, as `stop_signals` does, and restore the handler that was there. On any thread
    but the main one, which alone receives signals, nothing is listened to."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event.is_set
        return
    before = signal.signal(signal.SIGINT, _handler(event))
    try:
        yield event.is_set
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _handler(
    event: threading.Event, note: Callable[[int], None] = lambda number: None
) -> Callable[[int, FrameType | None], None]:
    def stop(number: int, frame: FrameType | None) -> None:
        note(number)
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    return stop
