"""The plan as a kernel inside whole decodes, in Triton's interpreter: everything else as it is, so logits are those of
the torch plan bit for bit, and so is what lies where."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from static_support import CASES, Case, decoder, small_model
from support import random_prompt
from test_compiled import on_random

from kvlens.kernels.compat import INTERPRET
from kvlens.kernels.zone_torch import zone_plan_torch
from kvlens.lab.gpu.kernels.arrivals import fill_cells_triton
from kvlens.lab.gpu.kernels.zone_plan import zone_plan_triton
from kvlens.lab.gpu.static.recall import StaticRecall

STEPS = 4
EXACT = {"atol": 0.0, "rtol": 0.0}
NEAR = {"atol": 1e-4, "rtol": 1e-4}


def state(made: Any) -> list[torch.Tensor]:
    """What the run has planned: tables, names of slots, keys and values in them, bytes."""
    recall, memory = made.session.recall, made.session.memory
    tables = [getattr(t, field.name) for t in recall.tables.values() for field in fields(t) if field.name != "stamp"]
    stamps = [torch.where(t.held > 0, t.stamp, 0) for t in recall.tables.values()]
    return [
        *tables,
        *stamps,
        *(x for pool in memory.hot.pools for x in pool.tensors()),
        memory.spans.is_hot,
        recall.moved,
    ]


@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
@pytest.mark.parametrize(
    "case",
    [CASES[5], Case("freekv", "0.3", overrides={"recall": "all"}), CASES[8], CASES[10]],
    ids=lambda case: case.id,
)
def test_a_decode_planned_by_the_kernel_is_the_decode_planned_by_torch(case: Case) -> None:
    """FreeKV's two plans a step, its pages moved again and again, parts of spans, equal reuse."""
    prompt, case = random_prompt(160), on_random(case)
    plain, planned = (decoder(small_model(case), prompt, case, STEPS) for _ in range(2))
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


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
@pytest.mark.parametrize("k3", [False, True])
@pytest.mark.parametrize("case", [CASES[14], CASES[15]], ids=lambda case: case.id)
def test_factors_come_by_kernels_as_by_torch(case: Case, k3: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zooms for the next step; keys turned after they are reconstructed. Reconstructed by PyTorch all is bit for bit
    the same; by k3, whose sums go in another order, it is but for rounding."""
    prompt, case = random_prompt(400), on_random(case)
    plain, made = (decoder(small_model(case), prompt, case, STEPS) for _ in range(2))
    filled = []

    def fill(
        new: Any, turn: Any, span: Any, offset: Any, fill: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        filled.append(bool(fill.any()))
        fill_cells_triton(new, turn, span, offset, fill, keys, values)

    monkeypatch.setattr("kvlens.lab.gpu.static.factors.fill_cells_triton", fill)
    try:
        factors = made.session.recall.factors
        assert factors is not None
        made.session.recall.plan = zone_plan_triton
        factors.use("triton")
        if not k3:
            monkeypatch.setattr(
                factors,
                "_by_kernel",
                lambda at, tiles: factors._by_torch(at, tiles[:, 0].view(factors.meta.shape[1], -1)),
            )
        token = prompt.ids[-1]
        for _ in range(STEPS):
            found, expected = made.step(token), plain.step(token)
            torch.testing.assert_close(found, expected, **NEAR if k3 else EXACT)
            token = int(expected.argmax())
            assert int(found.argmax()) == token
        for one, two in zip(state(made), state(plain), strict=True):
            torch.testing.assert_close(one, two, **NEAR if k3 and one.is_floating_point() else EXACT)
        assert any(filled)
        assert plain.moved_bytes().sum() > 0
    finally:
        plain.close()
        made.close()


def test_who_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on CUDA or where kernels are asked for, torch operations elsewhere."""
    made = decoder(small_model(CASES[5]), random_prompt(160), on_random(CASES[5]), 2)
    try:
        memory = made.session.memory
        assert made.session.recall.plan is zone_plan_torch
        assert StaticRecall(memory, None, "triton").plan is zone_plan_triton
        monkeypatch.setattr("kvlens.lab.gpu.static.recall.backend", lambda tensor: "triton")
        assert StaticRecall(memory).plan is zone_plan_triton
        assert StaticRecall(memory, None, "torch").plan is zone_plan_torch
    finally:
        made.close()
