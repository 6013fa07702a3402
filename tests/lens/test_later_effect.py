"""A span that full KV does not read yet at the step of loss: the verdict gives the steps of its effect, not masses of
zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlens.lens.verdict import LEAST_MASS, Missed, verdict
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory) -> Missed:
    folder: Path = tmp_path_factory.mktemp("later")
    uid = write_synthetic(folder, 2, 4, 2, 12, 14, seed=3, prompt_tokens=200)
    with TraceReader.open(folder, uid) as reader:
        found = verdict(reader)
    assert found is not None
    assert found.missed is not None
    assert found.missed.effect is not None
    return found.missed


def test_masses_of_zero_are_replaced_by_the_steps_of_the_effect(missed: Missed) -> None:
    nothing: dict[str, Any] = {"reference": LEAST_MASS / 20, "own_query": 0.0, "mass": 0.0, "regret": LEAST_MASS / 20}
    later = replace(missed, effect_steps=(0, 1, 2, 4), **nothing)
    assert later.later_steps == (1, 2, 4)
    assert "0.00," not in later.mass_words()
    assert later.mass_words().endswith("1-2, 4")
    assert later.regret_words() == ""


def test_masses_are_given_where_the_span_is_read_or_no_later_step_was_lost(missed: Missed) -> None:
    read = replace(missed, effect_steps=(0, 1, 2), reference=0.4)
    alone = replace(missed, effect_steps=(), reference=0.0, own_query=0.0)
    unknown = replace(missed, effect_steps=(0, 1), effect=None, reference=0.0, own_query=0.0)
    for case in (read, alone, unknown):
        assert case.later_steps == ()
        assert f"{case.mass:.2f}" in case.mass_words()
        assert f"{case.regret:.2f}" in case.regret_words()
