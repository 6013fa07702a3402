"""The pooled cosine of queries is that of PyTorch."""

from __future__ import annotations

import pytest
import torch

from kvlens.kernels.group_cosine import group_cosine, group_cosine_torch, group_cosine_triton


@pytest.mark.parametrize("pooling", ["mean", "max", "min"])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_cosine(dtype: torch.dtype, group: int, pooling: str) -> None:
    g = torch.Generator().manual_seed(group)
    q, previous = (torch.randn(2 * group, 20, generator=g).to(dtype)[:, :16] for _ in range(2))
    q[0] = 0
    exact = group_cosine_torch(q, previous, 2, pooling)
    assert torch.allclose(group_cosine_triton(q, previous, 2, pooling), exact, atol=1e-6)
    assert torch.equal(group_cosine(q, previous, 2, pooling), exact)
    assert torch.allclose(group_cosine_triton(previous, previous, 2, pooling), torch.ones(2), atol=1e-6)
