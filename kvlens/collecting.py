"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for while many objects are made that stay: libraries with a model, or the entries of a long
    list. The collector would go through them again and again, for a fifth of the time or more. Afterwards they count as
    old, so that it does not begin with them. Within itself, or where it was switched off before, it changes nothing.
    Where two threads overlap, the first that ends switches it on."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _settle()
        gc.enable()


class _Frozen:
    """What this process knows of frozen objects."""

    exist = False
    """somebody has frozen objects; asked until it is so, since counting many takes its time"""


def _settle() -> None:
    """Make all objects old. What somebody has frozen stays frozen."""
    _Frozen.exist = _Frozen.exist or gc.get_freeze_count() > 0
    if not _Frozen.exist:
        gc.freeze()
        gc.unfreeze()
