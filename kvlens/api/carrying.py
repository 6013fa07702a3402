"""What every call that runs a model has around it: progress, Ctrl-C, errors, and the caller's model left as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.api.errors import Interrupted, RunError, translated
from kvlens.api.models import Given, Named
from kvlens.api.progress import Progress
from kvlens.runs.stopping import interruptible

if TYPE_CHECKING:
    from kvlens.store.reader import TraceReader


@dataclass(frozen=True)
class Job:
    """A call on its way."""

    progress: Progress
    cancelled: Callable[[], bool]


@contextmanager
def carrying(models: Named | Given, progress: bool) -> Iterator[Job]:
    """Inside, a run may be carried out. Raises KvlensError for what the core refuses, and Interrupted where Ctrl-C
    ended it before it could be stored."""
    with ExitStack() as stack:
        stack.enter_context(translated())
        stack.enter_context(_torch_threads())
        if isinstance(models, Given):
            from kvlens.engine.objects import lent

            stack.enter_context(lent(models.loaded))
        cancelled = stack.enter_context(interruptible())
        bars = stack.enter_context(Progress(progress))
        try:
            yield Job(bars, cancelled)
        except ValueError as error:
            if cancelled():
                raise Interrupted(str(error)) from error
            raise


def check_end(reader: TraceReader, status: str) -> None:
    """Raise Interrupted for a run that Ctrl-C ended, RunError `self_check_failed` for a run that failed a self-check;
    both are stored."""
    from kvlens.lens.severity import failed_checks

    if status != "completed":
        raise Interrupted(f"interrupted; what was recorded is stored as {reader.uid}.", reader.uid)
    failed = list(failed_checks(reader))
    if failed:
        raise RunError(
            "self_check_failed",
            f"run {reader.uid} is stored and failed {', '.join(failed)}: open it and see run.reader.self_checks().",
            uid=reader.uid,
            failed=failed,
        )


@contextmanager
def _torch_threads() -> Iterator[None]:
    """A run sets the number of torch's threads; a caller who uses torch gets his own number back."""
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(threads)
