"""Low-rank factors against float64 NumPy."""

from __future__ import annotations

import lowrank_unit
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.kernels import lowrank, lowrank_bytes
from kvlens.kernels.lowrank import eigen_by_threads


def matrix(n: int, d: int, seed: int, decay: float = 0.6) -> torch.Tensor:
    """[n, d] with geometrically falling spectrum."""
    rng = np.random.default_rng(seed)
    r = min(n, d)
    u, _ = np.linalg.qr(rng.standard_normal((n, r)))
    v, _ = np.linalg.qr(rng.standard_normal((d, r)))
    return torch.tensor(u * decay ** np.arange(r) @ v.T, dtype=torch.float32)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 24), st.integers(1, 32), st.integers(0, 99))
def test_truncated_svd_is_the_best_approximation(n: int, d: int, max_rank: int, seed: int) -> None:
    x = matrix(n, d, seed)
    u, s, v = lowrank.truncated_svd(x, max_rank)
    rank = min(n, d, max_rank)
    assert u.shape == (n, rank)
    assert v.shape == (rank, d)
    exact = np.linalg.svd(x.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(s.numpy(), exact[:rank], atol=1e-5)
    error = torch.linalg.matrix_norm(x - lowrank.reconstruct(u, s, v)).item()
    assert error == pytest.approx(np.sqrt((exact[rank:] ** 2).sum()), abs=1e-5), "Eckart-Young"


def test_batch_padded_with_zero_rows_equals_single_spans() -> None:
    x = torch.zeros(2, 3, 20, 8)
    for b in range(2):
        for h in range(3):
            x[b, h, : 10 + 5 * b] = matrix(10 + 5 * b, 8, 10 * b + h)
    u, s, v = lowrank.truncated_svd(x, 4)
    assert u[0, :, 10:].abs().max() < 1e-6
    alone_u, alone_s, alone_v = lowrank.truncated_svd(x[0, 1, :10], 4)
    for batch, alone in ((u[0, 1, :10], alone_u), (s[0, 1], alone_s), (v[0, 1], alone_v)):
        torch.testing.assert_close(batch, alone, atol=2e-5, rtol=1e-4)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12), st.floats(0, 5), st.floats(0.1, 1.0))
def test_energy_gates_keep_the_fewest_components(values: list[float], tail: float, keep: float) -> None:
    sigma = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    energy = sigma.square().sum() + tail
    kept = int(lowrank.energy_gates(sigma, energy, keep).sum())
    sums = np.concatenate([[0.0], np.cumsum(sigma.numpy() ** 2)])
    assert kept >= 1
    assert kept == len(values) or sums[kept] >= keep * energy.item() * (1 - 1e-9)
    assert sums[kept - 1] < keep * energy.item() * (1 + 1e-9)


def test_gated_error_is_the_squared_error_of_the_gated_reconstruction() -> None:
    x = matrix(12, 8, 3).double()
    u, s, v = lowrank.truncated_svd(x, 8)
    gates = torch.linspace(1, 0, 8, dtype=torch.float64)
    difference = x - lowrank.reconstruct(u, gates * s, v)
    assert lowrank.gated_error(gates, s).item() == pytest.approx(difference.square().sum().item(), rel=1e-9)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=5))
def test_many_units_are_the_matrices_of_each(units: list[tuple[int, int, int]]) -> None:
    g, d = torch.Generator().manual_seed(len(units)), 6
    made = [
        [lowrank.Factors(*(torch.rand(*size, generator=g) for size in ((n, r), (r,), (r, d)))) for r in ranks]
        for n, *ranks in units
    ]
    flats = [lowrank_unit.pack(*pair) for pair in made]
    for (n, rank_k, rank_v), flat in zip(units, flats, strict=True):
        assert flat.numel() * 4 == lowrank_bytes.factor_bytes(n, rank_k, rank_v, d, 4)
        with pytest.raises(ValueError, match="numbers"):
            lowrank.unpack(flat[1:], n, rank_k, rank_v, d)
    start = torch.tensor([flat.numel() for flat in flats]).cumsum(0) - torch.tensor([flat.numel() for flat in flats])
    n, rank_k, rank_v = torch.tensor(units).T
    flat, sizes = torch.cat(flats), (20, 8, d)
    keys = lowrank.dense_units(flat, start, n, rank_k, sizes)
    values = lowrank.dense_units(flat, start + rank_k * (n + d + 1), n, rank_v, sizes)
    for unit, pair in enumerate(made):
        for found, factors in zip((keys[unit], values[unit]), pair, strict=True):
            torch.testing.assert_close(found[: len(factors.u)], factors.dense(), atol=1e-6, rtol=1e-5)
            assert not found[len(factors.u) :].any()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 20), st.integers(0, 5), st.integers(0, 99))
def test_squares_give_the_svd_of_matrices_without_full_rank_too(n: int, d: int, rank: int, seed: int) -> None:
    """float32 by eigenvectors against float64 by SVD: singular values, and what the factors stand for."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, n, rank, generator=g) @ torch.randn(3, rank, d, generator=g)
    u, s, v = lowrank.truncated_svd(x, 32)
    _, exact, _ = lowrank.truncated_svd(x.double(), 32)
    scale = float(exact.max()) + 1e-30
    assert (s - exact).abs().max() <= 1e-6 * scale
    assert (lowrank.reconstruct(u, s, v) - x).abs().max() <= 2e-6 * scale
    assert not u.isnan().any()
    assert not v.isnan().any()


@pytest.mark.parametrize(("rank", "shortest"), [(32, 44), (16, 19), (8, 9)])
def test_factors_pay_only_above_a_length(rank: int, shortest: int) -> None:
    """The lengths at head size 128 worked out in docs/evidence/sekv.md: r (n + 129) < 128 n."""
    for n in range(1, 200):
        numbers = lowrank_bytes.factor_elements(n, 2 * rank, 128)
        assert (numbers < lowrank_bytes.raw_elements(n, 128)) == (n >= shortest)
    assert lowrank_bytes.factor_bytes(64, rank, rank, 128, 2) == 2 * rank * (64 + 128 + 1) * 2


def test_relative_error() -> None:
    x = matrix(6, 4, 1)
    assert lowrank.relative_error(x, x).item() == 0
    assert lowrank.relative_error(x, torch.zeros_like(x)).item() == pytest.approx(1)
    assert lowrank.relative_error(torch.zeros(6, 4), torch.zeros(6, 4)).item() == 0


def test_threads_decompose_what_one_call_decomposes() -> None:
    matrices = torch.randn(2, 5, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    squares = matrices @ matrices.mT
    for mine, theirs in zip(eigen_by_threads(squares, 3), torch.linalg.eigh(squares), strict=True):
        assert torch.equal(mine, theirs)
    values, vectors = eigen_by_threads(squares[:0], 3)
    assert (values.shape, vectors.shape) == ((0, 5, 7), (0, 5, 7, 7))
