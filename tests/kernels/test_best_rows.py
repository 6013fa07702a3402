"""The best entries of rows are those of a stable sort, whatever is equal and whatever is -inf."""

from __future__ import annotations

import pytest
import torch

from kvlens.kernels.best_rows import best_rows, best_rows_torch, best_rows_triton


@pytest.mark.parametrize("entries", [1, 31, 300, 700])
@pytest.mark.parametrize("count", [1, 5, 400])
def test_the_kernel_is_a_stable_sort(entries: int, count: int) -> None:
    g = torch.Generator().manual_seed(entries)
    score = torch.randint(-4, 5, (3, entries), generator=g).float()  # many are equal
    score[0] = torch.randn(entries, generator=g)
    score[score == -4] = float("-inf")
    score[2, entries // 2 :] = float("-inf")
    wider = torch.full((3, entries + 7), torch.nan)
    wider[:, :entries] = score
    found = best_rows_triton(wider[:, :entries], count)
    assert torch.equal(found, best_rows_torch(score, count))
    assert torch.equal(best_rows(score, count), found)
    ids = torch.arange(entries, 0, -1) * 3
    named = torch.where(found < 0, found, ids[found])
    assert torch.equal(best_rows_triton(wider[:, :entries], count, ids), named)
    assert torch.equal(best_rows(score, count, ids), named)
    later = torch.where(found < 0, found, found + 7)
    assert torch.equal(best_rows_triton(wider[:, :entries], count, first_id=7), later)
    assert torch.equal(best_rows(score, count, first_id=7), later)


def test_equal_zeros_of_either_sign_stand_in_their_order() -> None:
    score = torch.tensor([[0.0, -0.0, 1.0, 0.0]])
    assert best_rows_triton(score, 4).tolist() == best_rows_torch(score, 4).tolist() == [[2, 0, 1, 3]]
