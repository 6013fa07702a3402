"""Who has turned, what is read and what is remembered are those of PyTorch."""

from __future__ import annotations

import pytest
import torch

from kvlens.kernels.turned_reads import turned_reads, turned_reads_torch, turned_reads_triton

HEADS, DIM, SPANS = 4, 16, 37


def drawn(group: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, wishes, and the last step's, of which one head's are zero and one's are the same."""
    g = torch.Generator().manual_seed(group)
    q, queries = (torch.randn(HEADS * group, DIM + 3, generator=g).to(dtype)[:, :DIM] for _ in range(2))
    q[:group] = 0
    queries[group : 2 * group] = q[group : 2 * group]
    wishes, selected = (torch.rand(HEADS, SPANS, generator=g).argsort(1)[:, :5] for _ in range(2))
    wishes[2, 3:] = -1
    selected[:, 4] = -1
    return [q, wishes, queries, selected]


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("pooling", ["mean", "max", "min"])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_pytorch(dtype: torch.dtype, group: int, pooling: str, tau: float) -> None:
    exact, kernel, chosen = (drawn(group, dtype) for _ in range(3))
    expected = turned_reads_torch(*exact, SPANS, tau, pooling)
    for given, take in ((kernel, turned_reads_triton), (chosen, turned_reads)):
        found = take(*given, SPANS, tau, pooling)
        assert torch.allclose(found.alike, expected.alike, atol=1e-6)
        assert torch.equal(found.now, expected.now)
        assert torch.equal(found.fine, expected.fine)
        for remembered, target in zip(given, exact, strict=True):
            assert torch.equal(remembered, target)
    assert not expected.fine[:, 0].any()
    if tau == 0.8:
        assert expected.now[0]
        assert not expected.now[1]
