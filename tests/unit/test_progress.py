"""The bar of a phase whose total grows while it goes on, as a search's does."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvlens.cli import progress
from kvlens.cli.progress import Bar


def test_the_bar_follows_a_total_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    out = io.StringIO()
    bar = Bar(Console(file=out, width=100, force_terminal=True))
    for tried in (0, 4, 5, 9):
        bar.report("search", tried, max(tried, 4))
    bar._progress.refresh()
    bar.end_run("uid", "completed")
    said = out.getvalue()
    assert "9/9" in said
    assert "9/4" not in said
