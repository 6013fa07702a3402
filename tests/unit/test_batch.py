"""Runs whose decode steps are computed together: each is the run alone up to rounding, whatever the others do."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, raises_code, random_llama, random_prompt

from kvlens import methods
from kvlens.engine import batch as engine_batch
from kvlens.engine.batch import Seat, StepBatch
from kvlens.engine.engine import Engine, Options
from kvlens.methods.faults import MethodFault
from kvlens.methods.quest import Quest
from kvlens.runs.turns import Hearing, Turns

ROUNDING = 2e-4
"""nats and shares by which rows of a batch differ from a run alone in float32"""
FAMILIES = ("full", "snapkv", "h2o", "quest", "freekv", "sentkv", "kivi", "infllm", "infinigen", "streaming_llm")


class Failing(Quest):
    """Raises in its third step."""

    name = "failing"

    def __init__(self, params: Any, context: Any) -> None:
        super().__init__(params, context)
        self._calls = 0

    def select(self, layer: int, q: torch.Tensor) -> Any:
        self._calls += layer == 0
        if self._calls == 3 and layer == 1:
            raise ArithmeticError("in step 2")
        return super().select(layer, q)


@dataclass
class Case:
    """One run of a batch."""

    method: str
    tokens: int
    new: int
    sink: ListSink = field(default_factory=ListSink)
    outcome: Any = None
    """Result, or what the run raised"""

    def run(self, engine: Engine) -> None:
        kind = Failing if self.method == "failing" else methods.get(self.method)
        options = Options(max_new=self.new, ignore_eos=True, coverage=True, oracle="all")
        prompt = random_prompt(self.tokens, seed=self.tokens, stop=17)
        try:
            self.outcome = engine.run(prompt, kind, kind.Parameters(), None, options, self.sink)
        except Exception as error:
            self.outcome = error


def run_alone(model: Any, cases: list[Case]) -> None:
    for case in cases:
        case.run(Engine(model))


def run_together(model: Any, cases: list[Case]) -> StepBatch:
    turns, hearing, batch = Turns(len(cases)), Hearing(), StepBatch()

    def run_lane(lane: int) -> None:
        turns.wait(lane)
        torch.set_num_threads(1)
        try:
            cases[lane].run(Engine(model, Seat(batch, partial(turns.hand_on, lane))))
        finally:
            turns.leave(lane)

    hearing.run([partial(run_lane, lane) for lane in range(len(cases))])
    return batch


def cases_of(*names: str) -> list[Case]:
    """Runs on prompts of other lengths, which end at other steps."""
    return [Case(name, 200 + 37 * number, 6 + number % 4) for number, name in enumerate(names)]


def assert_close(alone: Case, together: Case) -> None:
    a, b = alone.outcome, together.outcome
    assert b.ids == a.ids
    assert torch.tensor(b.logprobs).sub(torch.tensor(a.logprobs)).abs().max() < ROUNDING
    assert b.peak_bytes == a.peak_bytes
    assert b.unannounced_bytes == a.unannounced_bytes
    assert [(check.name, check.passed) for check in b.checks] == [(check.name, check.passed) for check in a.checks]
    assert len(together.sink.steps) == len(alone.sink.steps) == alone.new
    for mine, other in zip(together.sink.steps, alone.sink.steps, strict=True):
        assert (mine.token_id, mine.peak_bytes, mine.resident_bytes) == (other.token_id, *sizes_of(other))
        for name, values in other.head.items():
            np.testing.assert_allclose(mine.head[name], values, rtol=0, atol=ROUNDING, err_msg=name)


def sizes_of(step: Any) -> tuple[int, int]:
    return step.peak_bytes, step.resident_bytes


def test_runs_of_every_family_equal_runs_alone() -> None:
    model = random_llama()
    alone, together = cases_of(*FAMILIES), cases_of(*FAMILIES)
    run_alone(model, alone)
    run_together(model, together)
    for a, b in zip(alone, together, strict=True):
        assert not isinstance(a.outcome, Exception), (a.method, a.outcome)
        assert not isinstance(b.outcome, Exception), (b.method, b.outcome)
        assert all(check.passed for check in b.outcome.checks), b.method
        assert_close(a, b)
    assert {case.outcome.most_rows for case in alone} == {1}
    rows = {case.method: case.outcome.most_rows for case in together}
    assert rows.pop("infinigen") == 1, "it looks ahead and decodes alone"
    assert set(rows.values()) == {len(FAMILIES) - 1}


def test_a_row_that_fails_or_ends_leaves_the_others_as_they_are() -> None:
    names = ("quest", "failing", "snapkv")
    model = random_llama()
    alone = [Case(name, 150 + 40 * n, 4 * n + 4) for n, name in enumerate(names)]
    together = [Case(case.method, case.tokens, case.new) for case in alone]
    run_alone(model, alone)
    batch = run_together(model, together)
    for case in (alone[1], together[1]):
        assert isinstance(case.outcome, MethodFault)
        assert (case.outcome.code, case.outcome.hook, case.outcome.step) == ("hook_raised", "select", 2)
    assert_close(alone[0], together[0])
    assert_close(alone[2], together[2])
    assert batch.passes == {3: 3, 2: 1, 1: 8}


def test_a_step_that_fails_before_the_model_ends_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(engine_batch, "BatchSession", fail)
    cases = cases_of("quest", "snapkv")
    batch = run_together(random_llama(), cases)
    assert [type(case.outcome) for case in cases] == [MemoryError, MemoryError]
    assert batch.passes == {2: 1}


def test_a_model_whose_frequencies_follow_the_text_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with raises_code("batch_rotary"):
        Seat(StepBatch(), lambda: None).check(random_llama(rope_parameters=rope))
