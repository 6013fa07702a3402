"""Garbage is not looked for while a long list is made, and is again afterwards."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from synthetic import write_synthetic

from kvlens.lens.listing import Search
from kvlens.lens.runlist import search_runs
from kvlens.store.collecting import uncollected


def test_it_is_looked_for_again_whatever_happens() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_list_of_runs_collects_nothing(tmp_path: Path) -> None:
    for number in range(3):
        write_synthetic(tmp_path, 2, 4, 2, 6, 4, number, uid=f"20260101-{number:06}-many")
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        gc.collect()
        collections.clear()
        with uncollected():
            listed = search_runs(tmp_path, Search())
        assert (len(listed), collections) == (3, [])
    finally:
        gc.callbacks.pop()
