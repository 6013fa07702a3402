"""What the libraries made is looked through once, not after every run of a page."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator

import pytest

from kvlens.app.ui.common.collector import MODULES, Collector


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(atexit, "register", lambda ending: calls.append(ending.__name__))
    return calls


def test_imports_are_frozen_once(frozen: list[str]) -> None:
    collector = Collector()
    assert [collector.freeze_imports() for _ in range(3)] == [True, False, False]
    assert frozen == ["unfreeze", "collect", "freeze"]


def test_they_are_frozen_again_once_a_page_has_imported_more(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    collector.freeze_imports()
    few = {f"imported_{i}": sys for i in range(MODULES - 1)}
    monkeypatch.setattr(sys, "modules", {**sys.modules, **few})
    assert not collector.freeze_imports()
    monkeypatch.setattr(sys, "modules", {**sys.modules, "imported_more": sys})
    assert collector.freeze_imports()
    assert frozen == ["unfreeze", *["collect", "freeze"] * 2]


def test_garbage_made_later_is_still_found() -> None:
    script = """
import gc, weakref
from kvlens.app.ui.common.collector import Collector
class Page: pass
Collector().freeze_imports()
page = Page(); page.itself = page
seen = weakref.ref(page)
del page
gc.collect(2)
assert seen() is None
assert gc.get_freeze_count() > 0
"""
    import subprocess

    assert subprocess.run([sys.executable, "-c", script], timeout=600).returncode == 0
