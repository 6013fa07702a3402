"""What a process of many runs gives back to the system."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_support import make_prefill, make_step

from kvlens.instruments import SpanKeys
from kvlens.meta import RunMeta
from kvlens.models import device
from kvlens.records import PrefillRecord
from kvlens.store.spanlists import span_key_table
from kvlens.store.tracefile import TraceFile
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


def keyed(span_keys: SpanKeys) -> PrefillRecord:
    """Return a record with these keys of spans."""
    return replace(make_prefill(), span_keys=span_keys)


def test_a_prompts_record_is_freed_when_it_is_written(tmp_path: Path) -> None:
    """The thread that writes does not keep it until the next job comes."""
    writer = TraceWriter(tmp_path)
    writer.begin(RunMeta(layers=2, q_heads=2, kv_heads=1, model="m", method="full"))
    span_keys = SpanKeys("post-rope", np.arange(2, dtype=np.int32), np.ones((2, 1, 2, 4), np.float32))
    writer.prefill(keyed(span_keys))
    freed = threading.Event()
    weakref.finalize(span_keys, freed.set)
    del span_keys
    assert freed.wait(60)
    writer.finish("completed", None, [], {})


def test_keys_of_spans_are_written_without_a_copy_and_leave_memory(tmp_path: Path) -> None:
    keys = np.ones((2, 64, 1_000, 64), np.float32)
    span_keys = SpanKeys("post-rope", np.arange(1_000, dtype=np.int32), keys)
    table = span_key_table(span_keys, (2, 64))
    assert np.shares_memory(table["key"].chunk(0).values.to_numpy(), keys)
    meta = RunMeta(layers=2, q_heads=64, kv_heads=64, model="m", method="full")
    file = TraceFile.create(tmp_path / "trace.duckdb", meta.to_row())
    limit = "SELECT current_setting('memory_limit')"
    before = file._con.execute(limit).fetchone()
    file.flush(keyed(span_keys), "spans")
    rows = file._con.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchone()
    assert rows is not None
    assert rows[0] < 4 << 20
    assert file._con.execute(limit).fetchone() == before
    assert file._con.execute("SELECT count(*) FROM span_key").fetchone() == (128_000,)
    file.close()


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
