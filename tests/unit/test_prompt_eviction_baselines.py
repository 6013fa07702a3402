"""PyramidKV, AdaKV, ChunkKV, CAKE and Expected Attention against dense formulas in float64: which tokens stay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from test_prompt_eviction import best, window_scores

from kvlens.methods.families.token_shares import allocate, round_shares
from kvlens.methods.pyramidkv import falling, falling_by_whole_steps
from kvlens.methods.run_inputs import RunContext

WINDOW, TOKENS, N = 11, 37, 203
WHOLE = N + 1
"""the peeked token is the prompt's last"""


def paid(trial: Trial, layer: int, head: int) -> np.ndarray:
    """Attention of the window's queries, the peeked one the last of them: float64 [w, N + 1]."""
    q = np.concatenate([trial.queries[layer, head], trial.last_q[layer, head]])[-WINDOW:]
    k = np.concatenate([trial.keys[layer, head // SHAPE.group], trial.last_k[layer, head // SHAPE.group]])
    scores = q @ k.T / SHAPE.head_dim**0.5
    scores[np.triu_indices(WINDOW, len(k) - WINDOW + 1, len(k))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def of_group(kv_head: int) -> range:
    return range(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group)


def snap(trial: Trial, layer: int, kv_head: int) -> np.ndarray:
    return np.mean([window_scores(trial, layer, head, WINDOW, 7, "max") for head in of_group(kv_head)], axis=0)


def with_window(positions: list[int]) -> list[int]:
    return [*positions, *range(WHOLE - WINDOW, N)]


@pytest.mark.parametrize("beta", [1.0, 4.0, 20.0])
def test_pyramidkv_keeps_snapkvs_best_of_every_layer(beta: float) -> None:
    trial = Trial("pyramidkv", N, 5, window=WINDOW, tokens=TOKENS, beta=beta)
    average = TOKENS - WINDOW
    lowest = average / beta
    counts = [round(2 * average - lowest), round(lowest)]
    for layer in range(SHAPE.layers):
        for kv_head in range(SHAPE.kv_heads):
            expected = best(snap(trial, layer, kv_head), counts[layer])
            assert trial.lies(layer, kv_head) == with_window(expected)


def test_pyramids_add_up_and_the_authors_rounding_keeps_more() -> None:
    shares = falling(120, 32, 10_000, 20)
    assert sum(shares) == pytest.approx(32 * 120)
    assert (shares[0], shares[-1]) == pytest.approx((234, 6))
    assert np.allclose(np.diff(shares), shares[1] - shares[0])
    published = falling_by_whole_steps(120, 32, 10_000, 20)
    assert sum(published) == 4016  # of 3,840: 4.6 % more
    assert falling(120, 32, 240, 20) == [120] * 32
    assert falling_by_whole_steps(120, 32, 100, 20) == [100] * 32


def test_pyramidkv_says_what_the_authors_rounding_costs() -> None:
    shape = dataclasses.replace(SHAPE, layers=5)
    context = RunContext(shape, N, 5, None, shape.full_kv_bytes(N + 5), 0, "random", torch.float32, torch.device("cpu"))
    from kvlens import methods

    method = methods.get("pyramidkv")
    kept = {}
    for rounding in ("even", "floor"):
        params = methods.make_parameters(method, None, {"window": WINDOW, "tokens": TOKENS, "rounding": rounding})
        made: Any = method(params, context)
        kept[rounding] = [count for (count,) in made.tokens(None, 5 * TOKENS)]
        (note,) = made.drain_journal()
        assert note.values.tolist() == kept[rounding]
    assert sum(kept["even"]) == 5 * TOKENS
    assert kept["floor"] == [WINDOW + 51 - 12 * layer for layer in range(5)]
    assert sum(kept["floor"]) == 5 * TOKENS + 5


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_adakv_gives_heads_as_many_as_they_have_among_the_layers_best(floor: float) -> None:
    trial = Trial("adakv", N, 5, window=WINDOW, tokens=TOKENS, floor=floor)
    each = TOKENS - WINDOW
    unequal = False
    for layer in range(SHAPE.layers):
        scores = np.array([snap(trial, layer, kv_head) for kv_head in range(SHAPE.kv_heads)])
        order = np.argsort(-scores.ravel(), kind="stable")[: each * SHAPE.kv_heads]
        counts = np.bincount(order // scores.shape[1], minlength=SHAPE.kv_heads)
        mixed = round_shares([c * (1 - floor) + each * floor for c in counts], each * SHAPE.kv_heads)
        assert sum(mixed) == each * SHAPE.kv_heads
        unequal |= len(set(mixed)) > 1
        for kv_head, count in enumerate(mixed):
            assert trial.lies(layer, kv_head) == with_window(best(scores[kv_head], count))
    assert unequal == (floor < 1)


def test_rounding_gives_the_largest_fractions_one_more() -> None:
    assert round_shares([1.2, 3.7, 2.1], 7) == [1, 4, 2]
    assert round_shares([2.0, 2.0], 4) == [2, 2]


@pytest.mark.parametrize("agree", ["max", "mean"])
def test_headkv_divides_by_what_heads_retrieve(agree: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    induction = rng.random((SHAPE.layers, SHAPE.q_heads)) ** 4
    file, rows = tmp_path / "heads.json", induction.tolist()
    origin = {"layers": SHAPE.layers, "q_heads": SHAPE.q_heads}
    file.write_text(json.dumps({"method": "heads", "provenance": origin, "echo": rows, "induction": rows}))
    trial = Trial("headkv", N, 5, calibration=str(file), window=WINDOW, tokens=TOKENS, beta=1.25, agree=agree)
    grouped = induction.reshape(SHAPE.layers, SHAPE.kv_heads, SHAPE.group)
    score = (grouped.max(-1) if agree == "max" else grouped.mean(-1)).ravel()
    each, whole = TOKENS - WINDOW, TOKENS * score.size
    least = WINDOW + int(each - each / 1.25)
    shares = least + (whole - least * score.size) * score / score.sum()
    found = np.array([len(trial.lies(x, h)) + 1 for x in range(SHAPE.layers) for h in range(SHAPE.kv_heads)])
    assert found.sum() == whole
    assert np.abs(found - shares).max() <= 1
    for layer in range(SHAPE.layers):
        for kv_head in range(SHAPE.kv_heads):
            count = found[layer * SHAPE.kv_heads + kv_head] - WINDOW
            assert trial.lies(layer, kv_head) == with_window(best(snap(trial, layer, kv_head), count))


@pytest.mark.parametrize(("chunk", "reuse"), [(10, 1), (7, 2)])
def test_chunkkv_keeps_whole_chunks_for_all_heads(chunk: int, reuse: int) -> None:
    trial = Trial("chunkkv", N, 5, window=WINDOW, tokens=TOKENS, page=chunk, reuse=reuse)
    before = WHOLE - WINDOW
    for layer in range(SHAPE.layers):
        chooser = layer - layer % reuse
        each = np.sum([paid(trial, chooser, head)[:, :before].sum(0) for head in range(SHAPE.q_heads)], axis=0)
        means = [each[at : at + chunk].mean() for at in range(0, before, chunk)]
        expected: list[int] = []
        for at in np.argsort(-np.array(means), kind="stable"):
            members = range(at * chunk, min((at + 1) * chunk, before))
            if len(expected) + len(members) <= TOKENS - WINDOW:
                expected += members
        for kv_head in range(SHAPE.kv_heads):
            assert trial.lies(layer, kv_head) == with_window(sorted(expected))


def test_cake_divides_by_spread_and_shift_and_ranks_by_mean_and_variance() -> None:
    trial = Trial("cake", N, 5, window=WINDOW, tokens=TOKENS, spread=1.6, shift=0.4)
    before = WHOLE - WINDOW
    preference = []
    for layer in range(SHAPE.layers):
        rows = np.array([paid(trial, layer, head)[:, :before] for head in range(SHAPE.q_heads)])
        entropy, variance = -(rows * np.log(rows + 1e-10)).sum(), rows.var(1, ddof=1).sum()
        preference.append(entropy ** (1 / 1.6) * variance ** (1 / 0.4))
    counts = allocate(preference, SHAPE.layers * TOKENS, WINDOW, WHOLE)
    assert counts[0] != counts[1]
    assert sum(counts) == SHAPE.layers * TOKENS
    for layer in range(SHAPE.layers):
        for kv_head in range(SHAPE.kv_heads):
            score = np.zeros(before)
            for head in of_group(kv_head):
                row = paid(trial, layer, head)[:, :before]
                padded = np.pad(row.mean(0) + 200 * row.var(0, ddof=1), 2)
                score += np.array([padded[i : i + 5].mean() for i in range(before)])
            assert trial.lies(layer, kv_head) == with_window(best(score, counts[layer] - WINDOW))


def turning(position: float) -> np.ndarray:
    """The rotation of halves by a position, as a matrix that multiplies columns: float64 [D, D]."""
    half = SHAPE.head_dim // 2
    angle = position * 10000.0 ** -(np.arange(half) / half)
    c, s = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[c, -s], [s, c]])


def rotate(keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False) -> torch.Tensor:
    turns = np.array([turning(-float(p) if back else float(p)) for p in positions])
    return torch.einsum("...md,med->...me", keys.double(), torch.tensor(turns)).float()


@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention_weighs_keys_by_the_queries_to_come(covariance: bool) -> None:
    sinks, future, epsilon = 3, 17, 0.02
    trial = Trial(
        "expected_attention",
        N,
        5,
        rotate=rotate,
        tokens=TOKENS,
        sinks=sinks,
        future=future,
        epsilon=epsilon,
        covariance=covariance,
    )
    turn = np.mean([turning(p) for p in range(N, N + future)], axis=0)
    for layer in range(SHAPE.layers):
        for kv_head in range(SHAPE.kv_heads):
            weight = np.zeros(N - sinks)
            for head in of_group(kv_head):
                plain = np.array([turning(-p) @ trial.queries[layer, head, p] for p in range(sinks, N)])
                mean, scatter = turn @ plain.mean(0), turn @ np.cov(plain.T, bias=True) @ turn.T
                keys = trial.keys[layer, kv_head, sinks:]
                logits = keys @ mean / SHAPE.head_dim**0.5
                if covariance:
                    logits += np.einsum("nd,de,ne->n", keys, scatter, keys) / (2 * SHAPE.head_dim)
                logits = np.exp(logits - logits.max())
                weight += logits / logits.sum() / SHAPE.group
            score = (weight + epsilon) * np.linalg.norm(trial.values[layer, kv_head, sinks:], axis=-1)
            expected = [*range(sinks), *(p + sinks for p in best(score, TOKENS - sinks))]
            assert trial.lies(layer, kv_head) == sorted(expected)


def test_expected_attention_says_when_a_model_has_no_rotation_to_take_back() -> None:
    with pytest.raises(ValueError, match="'random' has none"):
        Trial("expected_attention", N, 5, tokens=TOKENS)
