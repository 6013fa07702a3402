"""Sums by group: the same on every device, in the order of the rows."""

from __future__ import annotations

import pytest
import torch

from kvlens.kernels.group_sums import sum_by_group, sum_sorted


@pytest.mark.parametrize("dim", [(), (64,)])
def test_sorted_sums_equal_the_sums_in_order_bit_for_bit(dim: tuple[int, ...]) -> None:
    """CUDA takes the sorted sums; a group may be empty, or have one row."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(3, 500, *dim, generator=generator)
    group = torch.randint(0, 37, (3, 500), generator=generator)
    group[group == 5] = 6
    group[:, 499] = 39
    in_order, ordered = sum_by_group(values, group, 41), sum_sorted(values, group, 41)
    assert torch.equal(in_order, ordered)
    exact = torch.zeros(3, 41, *dim, dtype=torch.float64)
    for head in range(3):
        exact[head].index_add_(0, group[head], values[head].double())
    assert float((ordered - exact).abs().max()) < 1e-5
    assert not ordered[:, 5].any()
    assert torch.equal(ordered[:, 39], values[:, 499])
