"""Every lie of the study is caught by its hook's name, and the page of docs/evidence shows that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlens.lab.studies.lies import ENDS, FIGURES, HANGS, HIDES, IN_PLACE, LATER
from kvlens.lab.studies.plugin_lies import Caught, page, tell_all
from kvlens.methods import faults

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "plugin-lies.md"
CODES = {
    IN_PLACE: {faults.CHANGED},
    FIGURES: {faults.FIGURE, faults.OUTPUT},
    ENDS: {faults.RAISED},
    HANGS: {faults.HANGS},
}


@pytest.fixture(scope="module")
def rows() -> list[Caught]:
    return tell_all()


def test_every_lie_is_caught(rows: list[Caught]) -> None:
    assert [row.lie.words for row in rows if not row.caught] == []
    assert {row.lie.kind for row in rows} == {*CODES, LATER, HIDES}


def test_lies_in_a_hook_end_the_run_with_the_hooks_name(rows: list[Caught]) -> None:
    for row in rows:
        if row.lie.kind in CODES:
            assert row.code in CODES[row.lie.kind], row.lie.words
            assert row.hook == row.lie.hook, row.lie.words


def test_hidden_tensors_are_counted(rows: list[Caught]) -> None:
    sizes = {row.hidden for row in rows if row.lie.kind == HIDES}
    assert len(sizes) == 1
    assert sizes.pop() > 0


def test_the_page_shows_these_results(rows: list[Caught]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    day = re.search(r"\d{4}-\d\d-\d\d", text)
    assert day is not None
    assert text == page(rows, day[0])
