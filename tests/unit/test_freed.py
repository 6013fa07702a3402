"""What a process of many runs gives back to the system."""

from __future__ import annotations

import os
import subprocess
import sys

GROWN = """
import ctypes, os
from kvlens.runs.carrying import give_back
def held():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
places = [libc.malloc(60_000) for _ in range(4_000)]
for place in places: ctypes.memset(place, 1, 60_000)
full = held()
for place in places[::2] + places[1:-1:2]: libc.free(place)
kept = held()
give_back()
print(full, kept, held())
"""


def test_what_lies_free_below_something_that_is_held_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True, env=os.environ)
    full, kept, now = map(int, done.stdout.split())
    assert kept > full - 40e6, "the allocator keeps it: something above it is held"
    assert now < kept - 200e6
