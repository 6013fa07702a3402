"""The router's functions against float64 NumPy written from the equations."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlens.lab.training.sekv.files import load_router, save_router
from kvlens.methods.sekv import router as sr
from kvlens.shape import KVShape

L, H, H_KV, D, DIM, S = 2, 4, 2, 8, 3, 5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scores_follow_equations_2_to_5() -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 7, 1, 4, 9]
    keys = [rng.standard_normal((H_KV, n, D)) for n in lengths]
    nats = [rng.exponential(size=n) for n in lengths]
    weight, query = rng.standard_normal((H, DIM, D)), rng.standard_normal((H, D))
    expected = np.zeros((H, S))
    for s in range(S):
        for h in range(H):
            w = nats[s] / nats[s].sum()
            total = sum(w[t] * weight[h] @ keys[s][h // 2, t] for t in range(lengths[s]))
            summary = total / np.sqrt((total**2).sum())
            expected[h, s] = (weight[h] @ query[h]) @ summary / math.sqrt(DIM) + math.log(lengths[s])
    mean = torch.stack(
        [
            (sr.surprisal_weights(torch.tensor(h))[None, :, None] * torch.tensor(k)).sum(1)
            for h, k in zip(nats, keys, strict=True)
        ],
        dim=1,
    )
    w64 = torch.tensor(weight)
    summary = sr.summaries(w64, mean)
    alive = torch.ones(S, dtype=torch.bool)
    got = sr.scores(sr.route(w64, torch.tensor(query)[:, None]), summary, torch.tensor(lengths).double(), alive)[:, 0]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)
    tau = torch.tensor([0.3, 0.9, 0.99, 0.5], dtype=torch.float64)
    z = sr.expand(got[:, None], sr.logit(tau))[:, 0]
    assert np.array_equal(z.numpy(), 1 / (1 + np.exp(-expected)) > tau.numpy()[:, None])


def test_unused_places_are_never_expanded() -> None:
    alive = torch.tensor([True, False])
    score = sr.scores(random(H, 1, DIM), random(H, 2, DIM, seed=1), torch.ones(2), alive)
    assert torch.isinf(score[..., 1]).all()
    assert not sr.expand(score, torch.full((H,), -1e9))[..., 1].any()


@pytest.mark.parametrize("seed", range(4))
def test_piece_scores_are_the_best_coarse_logit_of_a_span(seed: int) -> None:
    """Against float64 NumPy: three spans of 2, 1 and 3 pieces in a table with a free place."""
    rng = np.random.default_rng(seed)
    owner, tokens = [0, 0, 1, 2, 2, 2, -1], rng.integers(1, 20, 7)
    pieces, scale = rng.standard_normal((H_KV, 7, D)), rng.uniform(0.5, 2, (H_KV, 7, 1))
    query = rng.standard_normal((H, 6, D))
    expected = np.full((H, 6, 4), -np.inf)
    for h in range(H):
        for t in range(6):
            for p, of in enumerate(owner):
                if of >= 0:
                    logit = query[h, t] @ (pieces[h // 2, p] * scale[h // 2, p]) / math.sqrt(D) + math.log(tokens[p])
                    expected[h, t, of] = max(expected[h, t, of], logit)
    got = sr.piece_scores(*map(torch.tensor, (query, pieces, scale, tokens.astype(float), owner)), 4)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_bounds_are_never_below_a_key_and_reached_by_one() -> None:
    """Against float64: the bound of a piece is a sum over dimensions, at least every key's logit, equal for one key."""
    keys = random(1, H_KV, 12, D, seed=8).double()
    ranges, owner = [(0, 5), (5, 11), (11, 12)], torch.tensor([0, 0, 1])
    query = random(H, 7, D, seed=9).double()
    kept = sr.ranges_of_keys(keys, ranges)[0]
    got = sr.bound_scores(query, kept, torch.ones(1, 1, 1), owner, 2)
    logits = query @ keys[0].repeat_interleave(2, 0).mT / math.sqrt(D)
    assert (got[..., 0] >= logits[..., :11].amax(-1) - 1e-12).all()
    torch.testing.assert_close(got[..., 1], logits[..., 11])
    by_hand = []
    for a, b in ranges[:2]:
        k = keys[0, 1, a:b].numpy()
        q = query[3, 2].numpy()
        by_hand.append(np.maximum(q * k.max(0), q * k.min(0)).sum() / math.sqrt(D))
    assert float(got[3, 2, 0]) == pytest.approx(max(by_hand), rel=1e-12)


def test_eight_bits_are_off_by_half_a_step_at_most() -> None:
    x = random(L, H_KV, 5, D, seed=7) * torch.tensor([1e-3, 1.0, 7.0, 0.0, 1e3])[:, None]
    small, scale = sr.to_bytes(x)
    assert small.dtype == torch.int8
    assert ((small * scale - x).abs() <= 0.5001 * scale).all()
    assert (small[..., 3, :] == 0).all()


def test_pools_of_a_group() -> None:
    """Two heads, scores by hand: shares of the first are 1/2, 1/2, 0, of the second 0, 1/4, 3/4."""
    score = torch.tensor([[[0.0, 0.0, -math.inf], [-math.inf, 0.0, math.log(3)]]])
    every = torch.ones_like(score, dtype=torch.bool)
    torch.testing.assert_close(sr.pooled("share", score, every), torch.tensor([[0.25, 0.375, 0.375]]))
    torch.testing.assert_close(sr.pooled("max", score, every), torch.tensor([[0.0, 0.0, math.log(3)]]))
    torch.testing.assert_close(sr.pooled("mean", score[..., 1:2], every[..., 1:2]), torch.tensor([[0.0]]))


def test_a_query_head_that_does_not_ask_sets_no_priority() -> None:
    """Eq. 9: the first span is asked for by head 0 alone, the second by both, the third by none."""
    score = torch.tensor([[[1.0, 2.0, 3.0], [5.0, 4.0, 1.0]]])
    asked = torch.tensor([[[True, True, False], [False, True, False]]])
    assert sr.pooled("max", score, asked).tolist() == [[1.0, 4.0, 3.0]]
    assert sr.pooled("mean", score, asked).tolist() == [[1.0, 3.0, 2.0]]
    shares = score.softmax(-1)[0]
    expected = torch.stack((shares[0, 0], shares[:, 1].mean(), shares[:, 2].mean()))
    torch.testing.assert_close(sr.pooled("share", score, asked)[0], expected)


def test_a_rate_of_one_asks_for_every_span() -> None:
    score = random(H, 20, S, seed=6)
    assert sr.expand(score, sr.fit_threshold(score, 1.0)).all()


def test_weights_add_up_to_one_even_without_surprisal() -> None:
    torch.testing.assert_close(sr.surprisal_weights(torch.tensor([1.0, 3.0, 0.0])), torch.tensor([0.25, 0.75, 0.0]))
    torch.testing.assert_close(sr.surprisal_weights(torch.zeros(4)), torch.full((4,), 0.25))


def test_pca_finds_the_directions_of_largest_variance() -> None:
    basis, _ = torch.linalg.qr(random(D, D, seed=3))
    scale = torch.tensor([9.0, 5.0, 3.0, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2])
    keys = random(H_KV, 400, D, seed=4) * scale @ basis.T + 7.0
    weight = sr.fit_pca(keys, group=2, dim=3)
    assert weight.shape == (H, 3, D)
    assert torch.equal(weight[0], weight[1])
    torch.testing.assert_close(weight @ weight.transpose(-1, -2), torch.eye(3).expand(H, 3, 3), atol=1e-5, rtol=0)
    inside = torch.linalg.vector_norm(weight @ basis[:, :3], dim=(-1, -2)) ** 2
    torch.testing.assert_close(inside, torch.full((H,), 3.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.25, 1.0])
def test_threshold_meets_the_rate_on_the_prompt(rate: float) -> None:
    score = random(L, H, 20, S, seed=5)
    score[:, :, :10, 4] = -math.inf
    threshold = sr.fit_threshold(score, rate)
    count = 20 * S - 10
    expected = math.floor(rate * count + 1e-4)
    expanded = sr.expand(score, threshold).flatten(-2).sum(-1)
    assert (expanded == expected).all()


def test_threshold_without_spans_expands_nothing() -> None:
    assert (sr.fit_threshold(torch.full((H, 3, 2), -math.inf), 0.05) == math.inf).all()


def test_save_and_load(tmp_path: Path) -> None:
    gates = sr.GateMLP(6, DIM)
    router = sr.Router("trained", random(L, H, DIM, D), random(L, H, seed=2), gates, {"model": "tiny", "seed": 1})
    save_router(router, tmp_path / "router.safetensors")
    back = load_router(tmp_path / "router.safetensors", KVShape(L, H, H_KV, D, 4))
    assert torch.equal(back.weight, router.weight)
    assert torch.equal(back.threshold, router.threshold)
    assert back.provenance == {"model": "tiny", "seed": 1}
    assert back.gates is not None
    inputs = (random(2, 4).abs().sort(-1, descending=True).values, random(2, DIM), torch.tensor([16.0, 9.0]), True)
    torch.testing.assert_close(back.gates(*inputs), gates(*inputs))
    assert back.gates(*inputs).shape == (2, 4)
    with pytest.raises(ValueError, match="this model has 3"):
        load_router(tmp_path / "router.safetensors", KVShape(3, H, H_KV, D, 4))


def test_parameter_count_of_the_gate_predictor() -> None:
    assert sum(p.numel() for p in sr.GateMLP(32, 32).parameters()) == 66 * 128 + 128 + 128 * 64 + 64 + 64 * 32 + 32
