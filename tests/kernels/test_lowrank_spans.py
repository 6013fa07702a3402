"""k3 against float64: ragged spans and ranks, places without a span, heads that do not read, poison around the
units."""

from __future__ import annotations

import math

import pytest
import torch
from lowrank_unit import compress, pack

from kvlens.kernels.lowrank import truncated_svd
from kvlens.kernels.merge import merge_torch
from kvlens.kernels.page_attend import Pages, page_attention_torch
from kvlens.lab.gpu.kernels.lowrank_spans import (
    Spans,
    attend,
    attend_torch,
    attend_triton,
    reconstruct,
    reconstruct_torch,
    reconstruct_triton,
)

SIZES = ((16, 8, 5), (40, 32, 32), (33, 17, 20), (90, 32, 16), (17, 1, 1), (1, 1, 1))
"""tokens and the two ranks"""


def spans(
    batch: int = 1, kv_heads: int = 2, places: int = 4, dim: int = 64, dtype: torch.dtype = torch.float32
) -> Spans:
    """Every third place is empty; NaN lies between the units, absurd numbers in the rows of empty places."""
    g = torch.Generator().manual_seed(dim)
    parts, rows, at = [], [], 0
    for place in range(batch * kv_heads * places):
        n, rank_k, rank_v = SIZES[place % len(SIZES)]
        if place % 3 == 2:
            rows.append((2**60, 0, 2**30, 2**30))
            continue
        factors = []
        for rank in (rank_k, rank_v):
            u, sigma, v = truncated_svd(torch.randn(n, dim, generator=g), rank)
            factors.append(compress(sigma, torch.rand(len(sigma), generator=g) / 2 + 0.5, u, v, drop=0.05))
        flat = torch.cat([torch.full((3,), torch.nan), pack(*factors)]).to(dtype)
        rows.append((at + 3, n, factors[0].rank, factors[1].rank))
        parts.append(flat)
        at += len(flat)
    return Spans(
        torch.cat([*parts, torch.full((64,), torch.nan, dtype=dtype)]),
        torch.tensor(rows).view(batch, kv_heads, places, 4),
        32,
    )


def wide(data: Spans) -> Spans:
    return Spans(data.flat.double(), data.meta, data.max_rank)


def tiles_of(data: Spans, page: int) -> torch.Tensor:
    """Tiles for all spans, each in slots of its own, and one tile with nothing to do."""
    rows = [
        (place, first)
        for place, (_, n, _, _) in enumerate(data.meta.view(-1, 4).tolist())
        for first in range(0, n, page)
    ]
    return torch.tensor([(-1, 2**40, 2**40), *((place, first, 2 * slot) for slot, (place, first) in enumerate(rows))])


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(32, torch.float32), (128, torch.bfloat16), (256, torch.float16), (64, torch.bfloat16)]
)
def test_reconstruction(dim: int, dtype: torch.dtype, token_major: bool) -> None:
    data = spans(dim=dim, dtype=dtype)
    tiles = tiles_of(data, 16)
    shape = (2 * len(tiles), 16, 2, dim) if token_major else (2 * len(tiles), 2, 16, dim)
    found = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    wanted = [x.double() for x in found]
    if token_major:
        found, wanted = [x.transpose(1, 2) for x in found], [x.transpose(1, 2) for x in wanted]
    reconstruct_triton(data, tiles, found[0], found[1])
    reconstruct_torch(wide(data), tiles, wanted[0], wanted[1])
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, exact in zip(found, wanted, strict=True):
        assert torch.equal(ours.isnan(), exact.isnan()), "written exactly where tokens are"
        assert exact.isnan().any()
        torch.testing.assert_close(
            ours.double(), exact, atol=1e-4 if dtype == torch.float32 else tolerance, rtol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [
        (32, 1, torch.float32),
        (64, 2, torch.bfloat16),
        (128, 4, torch.float16),
        (256, 8, torch.bfloat16),
        (64, 7, torch.float32),
    ],
)
def test_attending_factors(dim: int, group: int, dtype: torch.dtype, masked: bool) -> None:
    data = spans(batch=2, places=3, dim=dim, dtype=dtype)
    g = torch.Generator().manual_seed(group)
    q = torch.randn(2, 2 * group, dim, generator=g).to(dtype)
    reads = torch.rand(2, 2 * group, 3, generator=g) < 0.5 if masked else None
    parts, lses = attend_triton(q, data, reads, dim**-0.5)
    exact_parts, exact_lses = attend_torch(q.double(), wide(data), reads, dim**-0.5)
    torch.testing.assert_close(parts.double(), exact_parts, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lses.double(), exact_lses, atol=1e-4, rtol=1e-5)
    assert (lses == -math.inf).any()
    assert torch.isfinite(lses).any()


def test_fused_attention_equals_reconstructing_and_attending() -> None:
    """Through the merge: parts of spans make the same softmax as their reconstructed tokens in pages."""
    data = wide(spans(dim=32))
    tiles = tiles_of(data, 16)
    keys = torch.full((2 * len(tiles), 2, 16, 32), torch.nan, dtype=torch.float64)
    values = keys.clone()
    reconstruct(data, tiles, keys, values)
    meta, q = data.meta.view(-1, 4), torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1)).double()
    table, length = torch.zeros(1, 2, len(tiles), dtype=torch.int32), torch.zeros(1, 2, len(tiles), dtype=torch.int32)
    count = torch.zeros(1, 2, dtype=torch.int32)
    for place, first, slot in tiles.tolist()[1:]:
        h = place // 4
        table[0, h, count[0, h]], length[0, h, count[0, h]] = slot, min(16, int(meta[place, 1]) - first)
        count[0, h] += 1
    whole = page_attention_torch(q, keys, values, Pages(table, length, count), 0.2)
    out, lse = merge_torch(*attend(q, data, None, 0.2), torch.float64)
    torch.testing.assert_close(out, whole.output)
    torch.testing.assert_close(lse, whole.lse)


def test_cpu_tensors_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.lab.gpu.kernels.lowrank_spans.attend_triton", None)
    data = spans()
    parts, _ = attend(torch.ones(1, 4, 64), data, None, 0.1)
    assert parts.shape == (1, 4, 4, 64)


def test_pages_too_small_for_the_kernel_are_named() -> None:
    keys = torch.zeros(2, 2, 8, 64)
    with pytest.raises(ValueError, match="page"):
        reconstruct_triton(spans(), torch.tensor([[0, 0, 0]]), keys, keys)
