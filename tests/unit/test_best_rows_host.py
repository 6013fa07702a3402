"""What PyTorch selects of long rows on the host is what a stable sort gives, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.kernels.best_rows import LONG, best_rows_torch


def sorted_rows(score: torch.Tensor, count: int) -> torch.Tensor:
    order = score.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return order.masked_fill(score.gather(-1, order) == float("-inf"), -1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(LONG, 3 * LONG), st.integers(1, 3 * LONG), st.sampled_from(["", "ties", "few"])
)
def test_the_selection_is_the_head_of_a_stable_sort(seed: int, entries: int, count: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(3, entries, generator=generator)
    if kind == "ties":
        score = score.mul(2).round().div(2)  # with zeros below zero
    if kind == "few":
        score = score.masked_fill(torch.rand(3, entries, generator=generator) < 0.9, float("-inf"))
    assert torch.equal(best_rows_torch(score, count), sorted_rows(score, count))


@pytest.mark.parametrize("value", [0.0, -0.0, float("-inf"), float("inf"), -1.5])
def test_rows_of_one_value_keep_their_order(value: float) -> None:
    score = torch.full((2, 2 * LONG), value)
    assert torch.equal(best_rows_torch(score, 9), sorted_rows(score, 9))


def test_zeros_of_both_signs_are_equal() -> None:
    score = torch.zeros(1, LONG)
    score[0, ::2] = -0.0
    assert best_rows_torch(score, 5).tolist() == [[0, 1, 2, 3, 4]]
