"""Memory that a run has freed goes back to the system, so that a process of many runs does not grow."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    """glibc's malloc_trim; None on systems without it, whose allocators give memory back by themselves."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Asks the allocator for what it keeps of freed memory: tensors of every run have other sizes, and what lies free
    between them is not given back otherwise."""
    if (trim := _trim()) is not None:
        trim(0)
