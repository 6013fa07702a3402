"""The C library's heap: large tensors stay out of it, and what it keeps of freed memory is given back between phases.

glibc keeps freed memory for the next allocation. By default it learns to take blocks of up to 32 MB from that memory. A
small result that is made beside such a block stays when the block is freed, and the next block does not fit there any
more: the process grows with every layer.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

LARGE = 16 << 20
"""bytes from which a block has pages of its own, which go back to the system when it is freed"""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""parameters of mallopt, as malloc.h has them"""


@cache
def _library() -> Any:
    """Return glibc, told once to keep large blocks apart; None on other systems, whose allocators give memory back by
    themselves."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # no library of the process itself, as on Windows
        return None
    if not hasattr(library, "malloc_trim") or not hasattr(library, "mallopt"):
        return None
    library.mallopt(_MMAP_THRESHOLD, LARGE)
    library.mallopt(_TRIM_THRESHOLD, 2 * LARGE)
    return library


def give_back() -> bool:
    """Give the system back what the heap keeps of freed memory. Return False where there is nothing to call."""
    library = _library()
    if library is None:
        return False
    library.malloc_trim(0)
    return True
