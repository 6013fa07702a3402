"""The plan as a kernel inside whole decodes, in Triton's interpreter: everything else as it is, so logits are those of the torch plan bit
for bit, and so is what lies where."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from static_support import CASES, Case, decoder
from support import random_llama, random_prompt
from test_compiled import on_random

from kvlens.kernels.compat import INTERPRET
from kvlens.kernels.zone_plan import zone_plan_triton
from kvlens.kernels.zone_torch import zone_plan_torch
from kvlens.static.recall import StaticRecall

STEPS = 4


@pytest.fixture(scope="module")
def small() -> Any:
    return random_llama(num_hidden_layers=2)


def state(made: Any) -> list[torch.Tensor]:
    """What the run has planned: tables, names of slots, keys and values in them, bytes."""
    recall, memory = made.session.recall, made.session.memory
    tables = [getattr(t, field.name) for t in recall.tables.values() for field in fields(t) if field.name != "stamp"]
    stamps = [torch.where(t.held > 0, t.stamp, 0) for t in recall.tables.values()]
    return [*tables, *stamps, *(x for pool in memory.hot.pools for x in pool.tensors()), memory.is_hot, recall.moved]


@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
@pytest.mark.parametrize(
    "case", [CASES[5], Case("freekv", "0.3", overrides={"recall": "all"}), CASES[8], CASES[10], CASES[14]], ids=lambda case: case.id
)
def test_a_decode_planned_by_the_kernel_is_the_decode_planned_by_torch(small: Any, case: Case) -> None:
    """FreeKV's two plans a step, its pages moved again and again, parts of spans, equal reuse, factors."""
    prompt, case = random_prompt(400 if case.method == "sekv" else 160), on_random(case)
    plain, planned = (decoder(small, prompt, case, STEPS) for _ in range(2))
    asked = []

    def plan(*given: Any) -> Any:
        asked.append(given)
        return zone_plan_triton(*given)

    planned.session.recall.plan = plan
    try:
        token = prompt.ids[-1]
        for _ in range(STEPS):
            expected, found = plain.step(token), planned.step(token)
            assert torch.equal(found, expected)
            token = int(expected.argmax())
        assert asked
        for one, two in zip(state(planned), state(plain), strict=True):
            assert torch.equal(one, two)
        assert plain.moved_bytes().sum() > 0
        assert {wishes.equal_reuse for _, _, wishes, _ in asked} == {case.method == "sentkv"}
    finally:
        plain.close()
        planned.close()


def test_who_plans(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on CUDA or where kernels are asked for, torch operations elsewhere."""
    made = decoder(small, random_prompt(160), on_random(CASES[5]), 2)
    try:
        memory, rows = made.session.memory, made.session.rows
        assert made.session.recall.plan is zone_plan_torch
        assert StaticRecall(memory, rows, "triton").plan is zone_plan_triton
        monkeypatch.setattr("kvlens.static.recall.backend", lambda tensor: "triton")
        assert StaticRecall(memory, rows).plan is zone_plan_triton
        assert StaticRecall(memory, rows, "torch").plan is zone_plan_torch
    finally:
        made.close()
