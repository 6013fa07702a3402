"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage be looked for while many objects are made that stay; looking through them again and again takes
    as long as making them. Afterwards it is as before. Threads may overlap: the first that ends lets it be looked for
    again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
