"""RocketKV against both its stages written out in float64: what stays, and what every step attends."""

from __future__ import annotations

import numpy as np
import pytest
from methodtrial import SHAPE, Seen, Trial
from test_prompt_eviction import best, window_scores

from kvlens.methods.rocketkv import RocketKVParameters, Stages, capacity

WINDOW, N, NEW = 11, 203, 14


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def second_stage(q: np.ndarray, keys: np.ndarray, chunk: int, r: int, read: int) -> list[int]:
    """Of one KV head: q [G, D], keys [m, D] of what is left in their order -> which of them are attended."""
    dims = np.argsort(-np.abs(q).sum(0), kind="stable")[:r]
    scale = np.sqrt(q.shape[1] * np.abs(q[:, dims]).sum(1) / np.abs(q).sum(1))
    bounds = np.empty((len(keys), r))
    for start in range(0, len(keys), chunk):
        part = keys[start : start + chunk, dims]
        bounds[start : start + chunk] = np.where(q.sum(0)[dims] > 0, part.max(0), part.min(0))
    weight = softmax(q[:, dims] @ bounds.T / scale[:, None]).sum(0)
    return sorted(np.argsort(-weight, kind="stable")[:read].tolist())


@pytest.mark.parametrize("attended", [7, 50, 120])
def test_both_stages_are_the_papers(attended: int) -> None:
    """Chunks of three tokens, of two and of one."""
    trial = Trial("rocketkv", N, NEW, window=WINDOW, attended=attended)
    total = N + 1 + NEW
    ratio = total / attended
    kept = int(total / ratio ** (0.2 + 0.06 * np.log2(ratio))) - NEW
    c2 = (kept - 1 + NEW) / attended
    chunk = min(int(c2), int(np.ceil(c2**0.5)))
    assert chunk == {7: 3, 50: 2, 120: 1}[attended]
    r, read = round(SHAPE.head_dim * chunk / c2), round(attended / 2)

    seen = Seen(trial.session).bias
    left: dict[tuple[int, int], list[int]] = {}
    for layer, head in np.ndindex(SHAPE.layers, SHAPE.kv_heads):
        group = range(head * SHAPE.group, (head + 1) * SHAPE.group)
        votes = np.sum([window_scores(trial, layer, h, WINDOW, 1, "max") for h in group], axis=0)
        score = np.array([votes[max(0, i - 31) : i + 32].max() for i in range(len(votes))])
        left[layer, head] = [*best(score, kept - WINDOW), *range(N + 1 - WINDOW, N)]
        assert trial.lies(layer, head) == left[layer, head]
    keys = trial.keys.copy()
    for step in range(NEW):
        q, k = trial.step(step)
        keys = np.concatenate([keys, k[:, :, None]], 2)
        for (layer, head), positions in left.items():
            positions.append(N + step)
            group = q[layer, head * SHAPE.group : (head + 1) * SHAPE.group]
            found = second_stage(group, keys[layer, head, positions], chunk, r, read)
            for g in range(SHAPE.group):
                mine = trial.attended(layer, head * SHAPE.group + g, seen[layer])
                assert mine == [positions[at] for at in found], (step, layer, head)


def test_the_split_is_the_papers_and_ends_at_everything() -> None:
    assert capacity(512, 2048) == int(2048 / 4 ** (0.2 + 0.06 * 2))
    assert capacity(1, 2**16) == int(2**16 / 2 ** (16 * 0.8)), "alpha is .8 at most"
    assert capacity(300, 300) == 300
    all_of_it = Stages.plan(RocketKVParameters(), 300, 279, 20)
    assert (all_of_it.kept, all_of_it.ratio < 1) == (280, True)


@pytest.mark.parametrize("share", [0.16, 0.3, 0.6, 0.9])
def test_the_most_is_kept_that_the_bytes_hold(share: float) -> None:
    budget = int(share * SHAPE.full_kv_bytes(N + 1 + NEW))
    trial = Trial("rocketkv", N, NEW, budget=budget, window=WINDOW, attended=0)
    for step in range(NEW):
        trial.step(step)
        assert trial.session.memory.account.peak <= budget
    method = type(trial.session.method)
    made = trial.session.method.stages(trial.session.method.params, SHAPE, N, NEW, budget)
    more = Stages.plan(trial.session.method.params, made.read + 1, N, NEW)
    assert method._bytes(trial.session.method.params, more, SHAPE, N, NEW) > budget
