"""The condition of a figure in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from lensruns import write_lens_runs

from kvlens.lens import severity
from kvlens.lens.condition import AFTER, INSIDE, KNOWN, asked_condition, condition, listed, question_words, token_words
from kvlens.lens.verdict import LEAST_EFFECT, LEAST_MASS, verdict
from kvlens.meta import RunMeta
from kvlens.methods.naming import recorded_stand_in
from kvlens.store.reader import TraceReader


@dataclass(frozen=True)
class Run:
    """What a condition asks of a stored run."""

    meta: RunMeta

    def prompt_tokens(self) -> int:
        return self.meta.prompt_tokens or 0


def run(**fields: object) -> Any:
    return Run(meta(**fields))


def meta(**fields: object) -> RunMeta:
    about = {"layers": 1, "q_heads": 2, "kv_heads": 1, "model": "org/small", "method": "snapkv", "budget": "20%"}
    return RunMeta.model_validate(about | {"prompt_tokens": 100, "prompt_sha256": "a", "budget_bytes": 10} | fields)


def test_a_run_names_model_tokens_question_budget_and_n() -> None:
    parts = condition([run(question_start=40)]).split(" · ")
    assert parts[0] == "small"
    assert parts[1].startswith("100 ")
    assert parts[2] == KNOWN
    assert "20%" in parts[3]
    assert parts[4].split()[-1] == "1"


def test_a_question_that_was_fed_later_is_known_after_and_counts_as_prompt() -> None:
    line = condition([run(question="after", question_tokens=7)])
    assert AFTER in line
    assert " 107 " in f" {line} "
    assert question_words(meta(question="in", task="needle")) == KNOWN


def test_a_prompt_that_states_no_question_has_it_inside() -> None:
    assert question_words(meta()) == INSIDE
    assert question_words(meta(question_start=40)) == KNOWN
    for stated, words in ((True, KNOWN), (False, INSIDE)):
        assert words in asked_condition("org/small", 100, "in", ["budget 20%"], stated=stated).split(" · ")
    assert AFTER in asked_condition("org/small", 100, "after", ["budget 20%"], stated=False)


def test_several_runs_count_prompts_and_list_what_differs() -> None:
    runs = [run(), run(budget="40%"), run(prompt_sha256="b", prompt_tokens=300)]
    line = condition(runs)
    assert "n = 2" in line
    assert "3 runs" in line
    assert "20%" in line
    assert "40%" in line
    assert token_words([100, 300]) in line
    assert listed(map(str, range(5)), "budgets") == "5 budgets"
    assert condition([]) == ""


@dataclass(frozen=True)
class Case:
    regret: float
    effect: float
    named: bool


@pytest.mark.parametrize(
    "case",
    [
        Case(0.6 * LEAST_MASS, 0.6 * LEAST_EFFECT, False),
        Case(1.2 * LEAST_MASS, 0.0, True),
        Case(0.6 * LEAST_MASS, 1.2 * LEAST_EFFECT, True),
    ],
)
def test_what_is_below_the_least_is_no_cause(tmp_path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """A verdict names a span only where its regret or its effect is large enough to be one."""
    uid = write_lens_runs(tmp_path).lost
    triples = TraceReader.triples

    def small(self: TraceReader, step: int):
        frame = triples(self, step)
        return frame.assign(regret=case.regret, unread=0.0, effect=case.effect)

    monkeypatch.setattr(TraceReader, "triples", small)
    with TraceReader.open(tmp_path, uid) as reader:
        found = verdict(reader)
        assert found is not None
        assert (found.missed is not None, found.nothing_missed) == (case.named, not case.named)
        words = severity.unmissed_words(found, severity.severity(reader, found))
        assert ("not recorded" in words) == case.named


def test_a_run_from_before_stand_ins_were_recorded_has_those_of_its_preset() -> None:
    old = {"method": "sekv", "preset": "fit", "stand_in": None, "dtype": None}
    assert "untrained" in recorded_stand_in(old)
    assert recorded_stand_in(old | {"dtype": "float32"}) == ""
    assert recorded_stand_in(old | {"stand_in": "untrained thing"}) == "untrained thing"
    assert recorded_stand_in(old | {"method": "snapkv", "preset": "paper"}) == ""
    assert recorded_stand_in(old | {"method": "not_here"}) == ""
