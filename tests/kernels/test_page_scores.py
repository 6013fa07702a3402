"""k2 against float64: all poolings, poison behind the live pages, and what the score promises."""

from __future__ import annotations

import math

import pytest
import torch

from kvlens.kernels.page_scores import POOLINGS, Pooling, page_scores, page_scores_torch, page_scores_triton

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 4,
    dim: int = 64,
    places: int = 70,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Inputs, torch.Tensor]:
    """(q, lo, hi, n_page), and the keys of pages of 8 tokens. NaN behind the live pages."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, kv_heads, places, 8, dim, generator=g).to(dtype)
    n_page = torch.randint(1, places + 1, (batch, kv_heads), generator=g).int()
    n_page[0, 0] = places
    keys[torch.arange(places) >= n_page[..., None]] = torch.nan
    q = torch.randn(batch, kv_heads * group, dim, generator=g).to(dtype)
    return (q, keys.amin(-2), keys.amax(-2), n_page), keys


def wide(data: Inputs) -> Inputs:
    return data[0].double(), data[1].double(), data[2].double(), data[3]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "group"), [(32, 1), (64, 3), (128, 8), (256, 2)])
def test_scores_of_every_pooling(pooling: Pooling, dtype: torch.dtype, dim: int, group: int) -> None:
    data, _ = inputs(batch=2 if dim == 64 else 1, group=group, dim=dim, dtype=dtype, kv_heads=2)
    found = page_scores_triton(*data, pooling, dim**-0.5)
    wanted = page_scores_torch(*wide(data), pooling, dim**-0.5)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_head_without_pages(pooling: Pooling) -> None:
    data, _ = inputs(places=5)
    data[3][0, 1] = 0
    found = page_scores_triton(*data, pooling, 1.0)
    torch.testing.assert_close(found.double(), page_scores_torch(*wide(data), pooling, 1.0), atol=2e-5, rtol=1e-5)
    assert (found[0, 1] == -math.inf).all()


@pytest.mark.parametrize("places", [1, 64, 65, 200])
def test_any_number_of_tiles(places: int) -> None:
    data, _ = inputs(places=places, kv_heads=1, dim=32, seed=places)
    found = page_scores_triton(*data, "MeanS", 0.3)
    torch.testing.assert_close(found.double(), page_scores_torch(*wide(data), "MeanS", 0.3), atol=1e-5, rtol=1e-5)
    assert float(found[0, 0].sum()) == pytest.approx(1, abs=1e-5)


def test_the_score_is_an_upper_bound_of_every_token() -> None:
    data, keys = inputs(group=2, places=9)
    bound = page_scores_torch(*wide(data), "MaxQK", 1.0)
    best = torch.einsum("bhgd,bhnpd->bhgnp", data[0].double().view(1, 2, 2, 64), keys.double()).amax((2, 4))
    live = torch.arange(9) < data[3][..., None]
    assert (bound >= best - 1e-12)[live].all()


def test_large_scores_do_not_overflow_the_softmax() -> None:
    (q, lo, hi, n_page), _ = inputs(places=80, dim=32)
    found = page_scores_triton(q * 100, lo, hi, n_page, "MaxS", 10.0)
    assert torch.isfinite(found[0, 0]).all()
    assert float(found[0, 0].max()) <= 1 + 1e-6


@pytest.mark.parametrize("pooling", POOLINGS)
def test_rows_of_padding_do_not_win_where_all_scores_are_negative(pooling: Pooling) -> None:
    g = torch.Generator().manual_seed(1)
    q, hi = torch.rand(1, 6, 32, generator=g), -torch.rand(1, 2, 9, 32, generator=g)
    data = (q, hi - 0.1, hi, torch.tensor([[9, 4]], dtype=torch.int32))
    found = page_scores_triton(*data, pooling, 1.0)
    torch.testing.assert_close(found.double(), page_scores_torch(*wide(data), pooling, 1.0), atol=1e-5, rtol=1e-5)


def test_cpu_tensors_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.kernels.page_scores.page_scores_triton", None)
    data, _ = inputs(places=5)
    torch.testing.assert_close(page_scores(*data, "MaxQ", 1.0), page_scores_torch(*data, "MaxQ", 1.0))
