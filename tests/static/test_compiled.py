"""The step under torch.compile: the Hugging Face modules, the method and the recall in one graph, made once; ready to
be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from static_support import CASES, FETCHING, Case, Counting, decoder, small_model
from support import random_prompt
from torch._dynamo.utils import counters

from kvlens.lab.gpu.static import StaticDecoder
from kvlens.methods import get

STEPS = 16
HOST = ("item", "tolist", "cpu", "numpy", "nonzero", "tensor", "unique", "masked_select", "to_list")
"""Calls with which a graph would wait for the host, copy from it or have shapes that depend on data."""


@pytest.fixture
def fresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def on_random(case: Case) -> Case:
    """The case on a small model that nothing was trained or calibrated for: its tables take a larger share."""
    return Case(case.method, case.budget and "0.8", case.preset, {**get(case.method).untrained, **case.overrides})


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[i] for i in (0, 1, 2, 3, 5, 7, 9, 14, 15)], ids=lambda case: case.id)
def test_one_graph_for_all_steps(fresh: None, case: Case) -> None:
    prompt, case, backend = random_prompt(400), on_random(case), Counting()
    plain = decoder(small_model(case), prompt, case, STEPS)
    compiled = decoder(small_model(case), prompt, case, STEPS, ring=5).compiled(backend)
    try:
        assert compiled.decode(STEPS) == plain.decode(STEPS)
        assert torch.equal(compiled.moved_bytes(), plain.moved_bytes())
        assert (plain.moved_bytes().sum() > 0) == (case.method in FETCHING)
    finally:
        plain.close()
        compiled.close()
    assert len(backend.graphs) == counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert backend.calls == STEPS - 1, "step 0 runs as it is"
    assert len(backend.addresses) == 1, "a captured graph reads the same memory at every step"
    called = {
        str(getattr(node.target, "__name__", node.target))
        for node in backend.graphs[0].graph.nodes
        if node.op.startswith("call")
    }
    assert not called & set(HOST)


@pytest.mark.parametrize("case", [CASES[5], CASES[12]], ids=lambda case: case.id)
def test_without_mutation_it_is_the_same_step(fresh: None, case: Case) -> None:
    """What compilers that generate code are given: the graph with its writes turned into outputs (aot_eager)."""
    prompt, case = random_prompt(400), on_random(case)
    plain, compiled = (decoder(small_model(case), prompt, case, 12) for _ in range(2))
    try:
        assert compiled.compiled("aot_eager").decode(12) == plain.decode(12)
        assert torch.equal(compiled.moved_bytes(), plain.moved_bytes())
    finally:
        plain.close()
        compiled.close()


def test_a_graph_cannot_be_captured_on_a_cpu() -> None:
    made: StaticDecoder = decoder(small_model(CASES[0]), random_prompt(40), CASES[0], 4)
    try:
        made.decode(1)
        with pytest.raises(RuntimeError, match="needs a model on a CUDA device"):
            made.capture()
        with pytest.raises(RuntimeError, match=r"call capture\(\) first"):
            made.replay(3)
    finally:
        made.close()
