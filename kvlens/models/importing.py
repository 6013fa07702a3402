"""Importing what a model needs without what it does not: the largest part of a run's cold start."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

HASHING, DRAWING = "kvlens-fingerprint", "kvlens-bar"
"""names of the threads that may be there while libraries are imported: one hashes a model's files, one draws a progress
bar; neither wants SciPy"""


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for while libraries are imported and a model is made: a million objects that stay, which the
    collector would go through again and again, a fifth of the time. Afterwards they count as old, so that it does not
    begin with them. Within itself, or where it was switched off before, it changes nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _settled()
        gc.enable()


@cache
def _settled() -> None:
    """Once, since the libraries are imported once, and since counting what is frozen takes its time."""
    if gc.get_freeze_count() == 0:  # what somebody has frozen stays frozen
        gc.freeze()
        gc.unfreeze()


@contextmanager
def unseen(package: str) -> Iterator[None]:
    """As if a package were not installed, unless it is in memory already. Python's own way to say so: None in place of
    the module."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(package, gc) is None:
            del sys.modules[package]


def import_transformers() -> None:
    """transformers imports SciPy where it is installed, for losses of models that find objects in pictures; nobody
    trains one here. So it is imported as where there is no SciPy; where it insists, whoever imports it next has it.

    SciPy is out of sight for all threads meanwhile. So where there is another thread, of kvlens as a library or of a
    server, which might look for SciPy just then, nothing is hidden, and whoever imports transformers next has it with
    SciPy: only the main thread is known to want none, and those named HASHING and DRAWING."""
    if not _alone():
        return
    with suppress(ImportError), unseen("scipy"):
        import transformers.modeling_utils  # noqa: F401


def _alone() -> bool:
    """No thread is there but the main one and those that want no SciPy."""
    main = threading.main_thread()
    return all(thread is main or thread.name in (HASHING, DRAWING) for thread in threading.enumerate())
