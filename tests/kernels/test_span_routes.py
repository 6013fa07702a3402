"""Which spans are asked for, and in which order a KV head wishes for them: float64's."""

from __future__ import annotations

import pytest
import torch

from kvlens.kernels.span_routes import RouteTable, fits, routed, routed_torch, routed_triton

HEADS = 2


def drawn(group: int, rows: int, dim: int, own: bool, dtype: torch.dtype) -> tuple[torch.Tensor, RouteTable]:
    """Queries, and a table of which some rows are not in use; some heads ask for all, some for nothing."""
    g = torch.Generator().manual_seed(rows + group)
    q = torch.randn(HEADS * group, dim + 3, generator=g)[:, :dim].to(dtype)
    weight = torch.randn(HEADS * (group if own else 1), 5, dim, generator=g)
    summary = torch.randn(HEADS * group, rows, 5, generator=g).to(dtype)
    ids = torch.randperm(rows + 1, generator=g)[:rows]
    ids[rows // 2 :: 7] = 0
    threshold = torch.randn(HEADS * group, generator=g) + 2
    threshold[0], threshold[-1] = float("-inf"), float("inf")
    return q, RouteTable(weight, summary, torch.randint(1, 65, (rows,), generator=g).float(), ids, threshold)


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize(("group", "own"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("rows", [1, 70, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_float64(dtype: torch.dtype, rows: int, group: int, own: bool, pool: str) -> None:
    q, table = drawn(group, rows, 24, own, dtype)
    expected = routed_torch(q.double(), table, HEADS, rows + 1, pool)
    for take in (routed_triton, routed_torch, routed):
        found = take(q, table, HEADS, rows + 1, pool)
        assert torch.equal(found.fine, expected.fine)
        assert torch.equal(found.wishes, expected.wishes)
    assert not expected.fine[..., 0].any()
    asked = [set(row[row >= 0].tolist()) for row in expected.wishes]
    assert asked == [set(head.any(0).nonzero()[:, 0].tolist()) for head in expected.fine]
    assert expected.fine[0, 0].sum() == (table.ids > 0).sum()


def test_what_the_kernel_does_not_take() -> None:
    q, table = drawn(1, 70, 24, False, torch.float32)
    assert not fits(q, table, "max"), "a CPU tensor"
