"""The C library's heap: what it keeps of freed memory is given back at the boundaries of a run's phases.

glibc keeps freed memory for the next allocation. Tensors of the next phase have other sizes, so that they are made
beside the room of the phase before.
"""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's malloc_trim; None on systems without it, whose allocators give memory back by themselves."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no library of the process itself, as on Windows
        return None


def give_back() -> bool:
    """Give the system back what the heap keeps of freed memory. Return False where there is nothing to call."""
    trim = _trim()
    if trim is None:
        return False
    trim(0)
    return True
