"""What a process of many runs gives back to the system."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from store_support import make_prefill, make_step

from kvlens.meta import RunMeta
from kvlens.models import device
from kvlens.store.writer import TraceWriter

GROWN = """
import ctypes, os
from kvlens.models.device import give_back_heap
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
give_back_heap()
print(full, kept, held())
"""


def test_what_lies_free_below_something_that_is_held_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True, env=os.environ)
    full, kept, now = map(int, done.stdout.split())
    assert kept > full - 40e6, "the allocator keeps it: something above it is held"
    assert now < kept - 200e6


def test_a_writer_is_freed_as_soon_as_nobody_holds_it(tmp_path: Path) -> None:
    """It and the thread that wrote for it do not hold each other."""
    writer = TraceWriter(tmp_path)
    writer.begin(RunMeta(layers=2, q_heads=2, kv_heads=1, model="m", method="full"))
    writer.prefill(make_prefill(layers=2))
    writer.step(make_step(np.random.default_rng(3), 0, (2, 2, 1, 2), "a", set()))
    writer.finish("completed", None, [], {})
    held = weakref.ref(writer)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del writer
        assert held() is None
    finally:
        if was_enabled:
            gc.enable()


def test_freed_memory_is_given_back_only_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    class Other:
        """A C library without malloc_trim."""

    class Glibc:
        """A C library that notes its calls."""

        def malloc_trim(self, *sizes: int) -> None:
            calls.append(sizes)

        def mallopt(self, *sizes: int) -> None:
            calls.append(sizes)

    def fail(name: None) -> None:
        raise OSError

    for library, answer in ((lambda name: Other(), False), (fail, False), (lambda name: Glibc(), True)):
        monkeypatch.setattr(device.ctypes, "CDLL", library)
        device._library.cache_clear()
        assert device.give_back_heap() is answer
        assert bool(calls) is answer
    assert device.give_back_heap()
    assert calls == [(-3, device.LARGE), (-1, 2 * device.LARGE), (0,), (0,)]
    monkeypatch.undo()
    device._library.cache_clear()
