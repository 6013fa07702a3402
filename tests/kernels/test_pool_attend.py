"""Attention over a pool of slots: k1 in the interpreter against float64, whatever the number of slots, and the choice
between the two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kvlens.kernels import attend, pool_attend
from kvlens.kernels.attend import decode_attention


@dataclass(frozen=True)
class Pool:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    scaling: float

    def exact(self) -> torch.Tensor:
        packed = self.q.double().view(self.keys.shape[0], -1, self.q.shape[-1])
        scores = packed @ self.keys.double().transpose(1, 2) * self.scaling + self.bias.double()
        weights = scores.softmax(-1)
        # what is hidden holds NaN: it must not be multiplied, not even by 0
        return (weights @ self.values.double().nan_to_num(0.0)).view_as(self.q)


def pool(
    slots: int,
    kv_heads: int = 2,
    group: int = 4,
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    token_major: bool = False,
) -> Pool:
    """The pool is a part of a larger one, as a layer's slots are, and NaN lies around it."""
    g = torch.Generator().manual_seed(slots)
    made = []
    for _ in range(2):
        stored = (3, slots, kv_heads, dim) if token_major else (3, kv_heads, slots, dim)
        whole = torch.full(stored, torch.nan, dtype=dtype)
        layer = whole[1].transpose(0, 1) if token_major else whole[1]
        layer.copy_(torch.randn(kv_heads, slots, dim, generator=g))
        made.append(layer)
    bias = torch.randint(1, 200, (kv_heads, group, slots), generator=g).float().log()
    bias[torch.rand(bias.shape, generator=g) < 0.4] = -math.inf
    bias[..., slots // 2] = 0.5
    q = torch.randn(1, kv_heads * group, 1, dim, generator=g).to(dtype)
    return Pool(q, *made, bias, dim**-0.5)


@pytest.mark.parametrize("slots", [1, 2, 3, 31, 32, 33, 64, 95, 200, 257])
@pytest.mark.parametrize("token_major", [False, True])
def test_any_number_of_slots(slots: int, token_major: bool) -> None:
    case = pool(slots, token_major=token_major)
    found = pool_attend.pool_attention(case.q, case.keys, case.values, case.bias, case.scaling)
    assert found.shape == case.q.shape
    torch.testing.assert_close(found.double(), case.exact(), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("group", "dim"), [(1, 16), (8, 64), (3, 128), (2, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_head_sizes_and_types(group: int, dim: int, dtype: torch.dtype) -> None:
    case = pool(70, 2, group, dim, dtype)
    found = pool_attend.pool_attention(case.q, case.keys, case.values, case.bias, case.scaling)
    assert found.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), case.exact(), atol=tolerance, rtol=tolerance)


def test_what_nobody_attends_is_not_multiplied() -> None:
    """A page all of whose slots are hidden; and the two paths agree."""
    case = pool(100)
    case.bias[:, :, 32:64] = -math.inf
    found = pool_attend.pool_attention(case.q, case.keys, case.values, case.bias, case.scaling)
    torch.testing.assert_close(
        found, decode_attention(case.q, case.keys, case.values, case.bias, case.scaling), atol=2e-6, rtol=2e-5
    )


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attend.runs_on(torch.zeros(1, 4, 1, 64), biased=True) == "torch"
    monkeypatch.setattr(attend, "backend", lambda tensor: "triton")
    assert attend.runs_on(torch.zeros(1, 4, 1, 64), biased=True) == "triton"
    assert attend.runs_on(torch.zeros(1, 4, 1, 64), biased=False) == "torch", "the stock model's own call"
    assert attend.runs_on(torch.zeros(1, 4, 1, 80), biased=True) == "torch", "k1 takes powers of two"
    assert attend.runs_on(torch.zeros(1, 4, 1, 8), biased=True) == "torch"


def test_torch_compile_takes_it_as_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    case = pool(40)
    arguments = (case.q, case.keys, case.values, case.bias, case.scaling)
    monkeypatch.setattr(attend, "backend", lambda tensor: "triton")
    plain = decode_attention(*arguments)
    torch._dynamo.reset()
    compiled = torch.compile(decode_attention, backend="aot_eager", fullgraph=True)(*arguments)
    torch._dynamo.reset()
    assert torch.equal(plain, compiled)
