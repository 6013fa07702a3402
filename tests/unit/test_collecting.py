"""Garbage is not looked for while a long list is made, and is again afterwards."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from kvlens.lens import runlist
from kvlens.lens.listing import Search
from kvlens.store.collecting import uncollected


def _fail() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
        raise ZeroDivisionError


def test_it_is_looked_for_again_whatever_happens() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        _fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_list_of_runs_is_made_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, plain = [], runlist.list_runs

    def noted(folder: Path) -> Any:
        looked.append(gc.isenabled())
        return plain(folder)

    monkeypatch.setattr(runlist, "list_runs", noted)
    assert runlist.search_runs(tmp_path, Search()).empty
    assert looked == [False]
    assert gc.isenabled()
