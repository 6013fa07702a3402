"""k2 against float64: all poolings, poison where no candidate is, and what the score promises."""

from __future__ import annotations

import math

import pytest
import torch

from kvlens.kernels.page_scores import POOLINGS, Pooling, bound, page_scores, page_scores_torch, page_scores_triton

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 4,
    dim: int = 64,
    places: int = 70,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """(q, lo, hi, candidate) of pages of 8 tokens. NaN where no candidate is: behind the pages, and here and there."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, kv_heads, places, 8, dim, generator=g).to(dtype)
    live = torch.randint(1, places + 1, (batch, kv_heads), generator=g)
    live[0, 0] = places
    candidate = torch.arange(places) < live[..., None]
    candidate[..., 1:] &= torch.rand(batch, kv_heads, places - 1, generator=g) < 0.9
    keys[~candidate] = torch.nan
    q = torch.randn(batch, kv_heads * group, dim, generator=g).to(dtype)
    return q, keys.amin(-2), keys.amax(-2), candidate


def wide(data: Inputs) -> Inputs:
    return data[0].double(), data[1].double(), data[2].double(), data[3]


def by_definition(data: Inputs, pooling: Pooling, scaling: float) -> torch.Tensor:
    """In float64, element by element; of MaxS and MeanS the share itself, which then must not underflow."""
    q, lo, hi, candidate = wide(data)
    lo, hi = (x.masked_fill(~candidate[..., None], 0)[:, :, None] for x in (lo, hi))
    query = q.unflatten(1, (lo.shape[1], -1))
    if pooling in ("MaxQ", "MeanQ"):
        query = query.amax(2, keepdim=True) if pooling == "MaxQ" else query.mean(2, keepdim=True)
    scores = torch.maximum(query[:, :, :, None] * lo, query[:, :, :, None] * hi).sum(-1) * scaling
    if pooling in ("MaxS", "MeanS"):
        scores = scores.masked_fill(~candidate[:, :, None], -math.inf).softmax(-1)
    pooled = scores.mean(2) if pooling.startswith("Mean") else scores.amax(2)
    return pooled.masked_fill(~candidate, -math.inf)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_reference_is_the_definition(pooling: Pooling) -> None:
    data = inputs(batch=2, group=3)
    found, expected = page_scores_torch(*wide(data), pooling, 0.1), by_definition(data, pooling, 0.1)
    if pooling in ("MaxS", "MeanS"):
        found, expected = found.exp(), expected.clamp(min=0)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "group"), [(32, 1), (64, 3), (128, 8), (256, 2)])
def test_scores_of_every_pooling(pooling: Pooling, dtype: torch.dtype, dim: int, group: int) -> None:
    data = inputs(batch=2 if dim == 64 else 1, group=group, dim=dim, dtype=dtype, kv_heads=2)
    found = page_scores_triton(*data, pooling, dim**-0.5)
    wanted = page_scores_torch(*wide(data), pooling, dim**-0.5)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_head_without_pages(pooling: Pooling) -> None:
    data = inputs(places=5)
    data[3][0, 1] = False
    found, expected = page_scores_triton(*data, pooling, 1.0), page_scores_torch(*wide(data), pooling, 1.0)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    assert (found[0, 1] == -math.inf).all()
    assert (expected[0, 1] == -math.inf).all()


@pytest.mark.parametrize("places", [1, 64, 65, 200])
def test_any_number_of_tiles(places: int) -> None:
    data = inputs(places=places, kv_heads=1, dim=32, seed=places)
    found = page_scores_triton(*data, "MeanS", 0.3)
    torch.testing.assert_close(found.double(), page_scores_torch(*wide(data), "MeanS", 0.3), atol=1e-5, rtol=1e-5)
    assert float(found[0, 0].exp().sum()) == pytest.approx(1, abs=1e-5)


def test_candidates_shared_by_all_heads_and_bounds_that_lie_side_by_side() -> None:
    """As a method keeps them: [H_kv, N, 2, D], and which pages are full."""
    q, lo, hi, _ = inputs(places=70)
    both, full = torch.stack((lo, hi), -2).nan_to_num(), (torch.arange(70) < 66).expand(1, 2, -1)
    found = page_scores_triton(q, *both.unbind(-2), full, "MaxS", 1.0)
    expected = page_scores_torch(q, lo.nan_to_num(), hi.nan_to_num(), full.contiguous(), "MaxS", 1.0)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["MeanS", "MaxQK"])
@pytest.mark.parametrize("count", [0, 1, 70, 130])
def test_the_first_so_many_pages_are_candidates_as_flags_are(count: int, pooling: Pooling) -> None:
    g = torch.Generator().manual_seed(count)
    q, one, two = torch.randn(1, 8, 32, generator=g), *torch.randn(2, 1, 2, 130, 32, generator=g)
    bounds = torch.minimum(one, two), torch.maximum(one, two)
    flags = (torch.arange(130) < count).expand(1, 2, -1)
    for take in (page_scores_triton, page_scores_torch, page_scores):
        found = take(q, *bounds, torch.tensor(count), pooling, 0.5)
        assert torch.equal(found, take(q, *bounds, flags, pooling, 0.5))
        assert int(torch.isfinite(found).sum()) == 2 * count


def test_the_bound_is_one_of_every_token() -> None:
    g = torch.Generator().manual_seed(0)
    keys, q = torch.randn(2, 9, 8, 64, generator=g).double(), torch.randn(2, 3, 64, generator=g).double()
    best = torch.einsum("hgd,hnpd->hgnp", q, keys).amax(-1)
    assert (bound(q, keys.amin(-2), keys.amax(-2)) >= best - 1e-12).all()


@pytest.mark.parametrize("pooling", ["MaxS", "MeanS"])
def test_scores_hundreds_apart_stay_apart(pooling: Pooling) -> None:
    """Where float32 shares are 0 or 1: the logarithms are finite, below 0, and those of float64. Of MaxS every query
    head's best page may have the share 1."""
    q, *rest = inputs(places=80, dim=32)
    data = (q * 100, *rest)
    expected = page_scores_torch(*wide(data), pooling, 10.0)
    for found in (page_scores_triton(*data, pooling, 10.0), page_scores_torch(*data, pooling, 10.0)):
        there = found[data[3]]
        assert torch.isfinite(there).all()
        assert float(there.max()) <= 1e-6
        assert (there.exp() == 0).float().mean() > 0.5
        assert there.unique().numel() >= there.numel() - q.shape[1]
        torch.testing.assert_close(there.double(), expected[data[3]], atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_rows_of_padding_do_not_win_where_all_scores_are_negative(pooling: Pooling) -> None:
    g = torch.Generator().manual_seed(1)
    q, hi = torch.rand(1, 6, 32, generator=g), -torch.rand(1, 2, 9, 32, generator=g)
    data = (q, hi - 0.1, hi, torch.arange(9) < torch.tensor([[[9], [4]]]))
    found = page_scores_triton(*data, pooling, 1.0)
    torch.testing.assert_close(found.double(), page_scores_torch(*wide(data), pooling, 1.0), atol=1e-5, rtol=1e-5)


def test_torch_compile_takes_it_as_one_operation() -> None:
    data = tuple(x.nan_to_num() if x.is_floating_point() else x for x in inputs(places=20, dim=32))
    torch._dynamo.reset()
    found = torch.compile(page_scores_triton, backend="aot_eager", fullgraph=True)(*data, "MeanS", 0.5)
    torch._dynamo.reset()
    assert torch.equal(found, page_scores_triton(*data, "MeanS", 0.5))


def test_who_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch on the CPU, and on CUDA for head sizes that the kernel does not take."""
    monkeypatch.setattr("kvlens.kernels.page_scores.page_scores_triton", lambda *given: "triton")
    data, odd = inputs(places=5), inputs(places=5, dim=24)
    assert torch.equal(page_scores(*data, "MaxQ", 1.0), page_scores_torch(*data, "MaxQ", 1.0))
    monkeypatch.setattr("kvlens.kernels.page_scores.backend", lambda tensor: "triton")
    assert page_scores(*data, "MaxQ", 1.0) == "triton"
    assert torch.equal(page_scores(*odd, "MaxQ", 1.0), page_scores_torch(*odd, "MaxQ", 1.0))
