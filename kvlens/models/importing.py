"""Importing libraries and making a model without looking for garbage meanwhile: part of a run's cold start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


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
