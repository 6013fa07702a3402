"""MagicPIG against plain formulas in float64: which tokens are sampled, how they weigh, and what comes out."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import comb, pi
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial

from kvlens import methods
from kvlens.methods.magicpig import MagicPIG, sampling_probability
from kvlens.methods.run_inputs import Prefilled

N, NEW, BITS, TABLES, SINKS, LOCAL = 75, 20, 3, 12, 3, 10
SET = {"bits": BITS, "tables": TABLES, "sinks": SINKS, "local": LOCAL, "dense_every": 0, "page": 8}


def hashes(vectors: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Sides of the planes [..., L, K] as one number for each table."""
    sides = (vectors @ planes > 0).reshape(*vectors.shape[:-1], TABLES, BITS)
    return (sides * 2 ** np.arange(BITS)).sum(-1)


def chance(cosine: np.ndarray, hits: int) -> np.ndarray:
    same = (1 - np.arccos(np.clip(cosine, -1, 1)) / pi) ** BITS
    return sum(comb(TABLES, i) * same**i * (1 - same) ** (TABLES - i) for i in range(hits, TABLES + 1))


@pytest.mark.parametrize(("hits", "centred"), [(2, "true"), (1, "true"), (3, "false")])
def test_sampled_tokens_weigh_as_their_probability_says(hits: int, centred: str) -> None:
    trial = Trial("magicpig", N, NEW, **SET, hits=hits, centred=centred, least=0.0)
    seed = torch.Generator().manual_seed(0)
    planes = torch.randn(SHAPE.head_dim, TABLES * BITS, generator=seed).double().numpy()
    keys, values, sampled, left_out = trial.keys, trial.values, 0, 0
    centre = keys[:, :, SINKS : N - LOCAL].mean(2) * (centred == "true")
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        for layer in range(SHAPE.layers):
            for head in range(SHAPE.q_heads):
                h, query = head // SHAPE.group, q[layer, head]
                moved = keys[layer, h] - centre[layer, h]
                equal = (hashes(moved, planes) == hashes(query, planes)).sum(-1)
                static = np.ones(N + step + 1, bool)
                static[SINKS : N - LOCAL] = False
                read = static | (equal >= hits)
                cosine = moved @ query / np.linalg.norm(moved, axis=1) / np.linalg.norm(query)
                weight = np.exp(keys[layer, h] @ query / np.sqrt(SHAPE.head_dim))
                weight[~static] /= chance(cosine[~static], hits)
                weight[~read] = 0
                out = weight @ values[layer, h] / weight.sum()
                np.testing.assert_allclose(trial.outs[layer][0, head, 0], out, atol=1e-4)
                sampled, left_out = sampled + (read & ~static).sum(), left_out + (~read).sum()
    assert sampled
    assert left_out


def test_the_probability_is_that_of_drawn_planes() -> None:
    """Over 2,000 draws of tables, a pair of vectors is sampled as often as the formula says, within 4 deviations."""
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 24, generator=generator)
    b = 0.6 * a + b
    planes = torch.randn(2000, TABLES, BITS, 24, generator=generator)
    equal = ((planes @ a > 0) == (planes @ b > 0)).all(-1).sum(-1)
    cosine = torch.cosine_similarity(a, b, dim=0)
    for hits in (1, 2, 4):
        expected = float(sampling_probability(cosine, BITS, TABLES, hits))
        measured = float((equal >= hits).float().mean())
        assert abs(measured - expected) < 4 * (expected * (1 - expected) / 2000) ** 0.5, hits
        np.testing.assert_allclose(expected, chance(np.array(cosine), hits), rtol=1e-5)


@pytest.mark.parametrize(("tables", "hits"), [(150, 2), (150, 60), (2000, 1000)])
def test_the_probability_of_many_tables(tables: int, hits: int) -> None:
    """Numbers of ways that no float holds; the same sum in rational numbers, whose ends are 0 and 1."""
    cosine = torch.tensor([-1.0, -0.3, 0.0, 0.4, 1.0])
    expected = []
    for same in (1 - cosine.double().clamp(-1, 1).arccos() / pi).tolist():
        exact = Fraction(same)
        missed = sum(comb(tables, i) * exact**i * (1 - exact) ** (tables - i) for i in range(hits))
        expected.append(float(1 - missed))
    assert (expected[0], expected[-1]) == (0, 1)
    np.testing.assert_allclose(sampling_probability(cosine, 1, tables, hits), expected, atol=1e-11)


def test_layers_that_are_dense_read_everything() -> None:
    trial = Trial("magicpig", N, NEW, **{**SET, "dense_every": 2})
    q, k = trial.step(0)
    keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (trial.keys, trial.values))
    weight = np.exp(keys[0, 1] @ q[0, 4] / np.sqrt(SHAPE.head_dim))
    np.testing.assert_allclose(trial.outs[0][0, 4, 0], weight @ values[0, 1] / weight.sum(), atol=1e-4)
    assert trial.session.method.select(0, torch.zeros(SHAPE.q_heads, SHAPE.head_dim)) is None


@pytest.mark.parametrize("params", [SET, {**SET, "dense_every": 2}, {**SET, "dense_every": 1}, {**SET, "local": N}])
def test_the_bytes_held_are_those_announced(params: dict[str, Any]) -> None:
    trial = Trial("magicpig", N, NEW, **params)
    floor = methods.get("magicpig").floor_bytes(trial.session.method.params, SHAPE, N, NEW)
    assert trial.session.memory.account.resident == floor


def test_a_seed_decides_what_is_sampled() -> None:
    trial = Trial("magicpig", N, NEW, **SET)
    keys, values = torch.tensor(trial.keys).float(), torch.tensor(trial.values).float()
    prompt = Prefilled(None, keys, values, torch.zeros(0))

    def sample(seed: int) -> list[list[bool]]:
        method = MagicPIG(trial.session.method.params, replace(trial.session.context, seed=seed))
        method.prefill_end(prompt)
        selection = method.select(0, torch.ones(SHAPE.q_heads, SHAPE.head_dim))
        assert selection is not None
        assert selection.positions is not None
        return selection.positions.flatten(0, 1).tolist()

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


@pytest.mark.parametrize("bad", [{"bits": 16}, {"bits": 0}, {"tables": 1, "hits": 2}, {"least": -1.0}, {"hits": 0}])
def test_bad_parameters_are_one_sentence(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^magicpig: [^\n]*\.$"):
        methods.make_parameters(methods.get("magicpig"), None, bad)
