"""Rows out of a pool, by the kernel that the GPU bench measures: every row arrives from where the list says."""

from __future__ import annotations

import pytest
import torch

from kvlens.lab.gpu.row_gathers import gather_rows


@pytest.mark.parametrize(("count", "dim", "tokens"), [(1, 16, 16), (37, 32, 8), (70, 64, 1)])
def test_rows_arrive_from_where_the_list_says(count: int, dim: int, tokens: int) -> None:
    g = torch.Generator().manual_seed(count)
    rows = torch.randint(-(2**15), 2**15, (100, dim), generator=g).to(torch.int16)
    listed = torch.randint(0, len(rows), (count,), generator=g)
    target = torch.zeros(count, dim, dtype=torch.int16)
    gather_rows(rows, listed, target, tokens)
    assert torch.equal(target, rows[listed])
