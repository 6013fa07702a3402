"""What lists of runs and jobs say: outcomes, stored values, states."""

from __future__ import annotations

import time

import pytest

from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.jobview import state_word
from kvlens.lens.outcomelabel import outcome_label
from kvlens.text.valuetext import value_text


@pytest.mark.parametrize(
    ("words", "kinds", "label"),
    [
        ("wrong answer", ("wrong", "lost"), "Lost, wrong answer"),
        ("right answer, near tie", ("right", "diverged"), "Diverged, right answer, near tie"),
        ("wrong answer, as full KV", ("wrong", "kept"), "wrong answer, as full KV"),
        ("", ("unknown",), ""),
    ],
)
def test_an_outcome_begins_with_the_kind_that_it_is_looked_for_by(
    words: str, kinds: tuple[str, ...], label: str
) -> None:
    assert outcome_label(words, kinds) == label


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ((), ""),
        ({}, ""),
        (False, "no"),
        (0, "0"),
        ({"window": 8, "by": None, "rope": True}, "window 8, rope yes"),
        (["a", "b"], "a, b"),
        ([{"span": 1, "head": 0}, {"span": 2}], "span 1, head 0; span 2"),
    ],
)
def test_a_stored_value_is_read_by_a_person(value: object, text: str) -> None:
    assert value_text(value) == text


@pytest.mark.parametrize(("study", "word"), [("20260101-000000-aaaaaa", "paused"), (None, "cancelled")])
def test_a_study_that_was_stopped_is_paused(study: str | None, word: str) -> None:
    job = Job("a", [], "t", time.time(), state="cancelled")
    job.study = study
    assert state_word(job) == word
    job.state = "done"
    assert state_word(job) == "done"
