"""Selections that a device makes by kernels are those that PyTorch makes, from the tables of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from static_support import Case, decoder
from support import random_llama, random_prompt

from kvlens.kernels import best_rows, chunk_reads, span_routes
from kvlens.memory.placement import Selection
from kvlens.methods.sentkv import select

CASES = [
    Case("sentkv", "0.8", "demo", {}),
    Case("sentkv", "0.8", "demo", {"group": "mean"}),
    Case("sentkv", "0.8", "demo", {"group": "native"}),
    Case("sekv", "0.8", "demo", {"router": "pca"}),
    Case("sekv", "0.8", "demo", {"router": "pca", "pool": "mean", "zoom": "next"}),
    Case("sekv", "0.8", "demo", {"router": "mean"}),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama(num_hidden_layers=2, head_dim=16)


def selected(model: Any, case: Case) -> list[Selection]:
    """Of two layers, for queries that were drawn."""
    g = torch.Generator().manual_seed(3)
    made = decoder(model, random_prompt(400), case, 4)
    method = made.session.method
    assert (method.keeps_journal, method.in_graph) == (False, True)
    shape = made.session.memory.shape
    queries = torch.randn(2, shape.q_heads, shape.head_dim, generator=g)
    found = [method.select(layer, q) for layer, q in enumerate(queries)]
    made.close()
    return [selection for selection in found if selection is not None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method} {case.overrides}")
def test_kernels_select_what_pytorch_selects(model: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = selected(model, case)
    launched: list[str] = []
    for module, name in (
        (chunk_reads, "chunk_reads_triton"),
        (select, "page_scores_triton"),
        (span_routes, "best_rows"),
    ):
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, call=call, name=name: (launched.append(name), call(*given))[1])
    for module in (chunk_reads, select):
        monkeypatch.setattr(module, "backend", lambda tensor: "triton")
    monkeypatch.setattr(best_rows, "counts", lambda score: True)
    monkeypatch.setattr("kvlens.methods.sekv.routing.fits", lambda q, table, pool: pool in span_routes.POOLS)
    found = selected(model, case)
    assert len(found) == len(expected) == 2
    assert any(selection.fine.any() for selection in expected)
    for ours, exact in zip(found, expected, strict=True):
        assert torch.equal(ours.fine, exact.fine)
        assert torch.equal(ours.requested, exact.requested)
        assert (ours.tokens is None) == (exact.tokens is None)
        assert ours.tokens is None or torch.equal(ours.tokens, exact.tokens)  # type: ignore[arg-type]
    by_kernels = case.overrides.get("group") != "native" and case.overrides.get("router") != "mean"
    assert bool(launched) == by_kernels


@pytest.mark.parametrize("keeps_journal", [False, True])
def test_a_run_chooses_by_the_same_operations_recorded_or_not(
    model: Any, keeps_journal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel rounds otherwise, and a recorded run needs scores that the kernel does not give."""
    made = decoder(model, random_prompt(400), CASES[3], 4)
    method = made.session.method
    method.in_graph, method.keeps_journal = False, keeps_journal
    monkeypatch.setattr("kvlens.methods.sekv.routing.fits", lambda q, table, pool: True)
    monkeypatch.setattr("kvlens.methods.sekv.routing.routed_triton", None)
    shape = made.session.memory.shape
    selection = method.select(0, torch.randn(shape.q_heads, shape.head_dim))
    made.close()
    assert selection is not None
    assert (selection.score is not None) == keeps_journal
