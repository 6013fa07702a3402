"""ThinK against plain formulas in float64: which channels go, and what comes out without them."""

from __future__ import annotations

import numpy as np
import pytest
from methodtrial import SHAPE, Trial

from kvlens import methods

N, NEW, GROUP, RESIDUAL, WINDOW = 75, 40, 8, 16, 11


def dropped(trial: Trial, layer: int, kv_head: int, count: int) -> np.ndarray:
    """The channels of the lowest score."""
    heads = slice(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group)
    used = (trial.queries[layer, heads, -WINDOW:] ** 2).mean(1).mean(0)
    score = used * (trial.keys[layer, kv_head] ** 2).mean(0)
    return np.argsort(-score, kind="stable")[SHAPE.head_dim - count :]


@pytest.mark.parametrize("pruned", [0.4, 0.75])
def test_every_step_attends_keys_without_their_least_channels(pruned: float) -> None:
    trial = Trial("thinkkv", N, NEW, group=GROUP, residual=RESIDUAL, window=WINDOW, pruned=pruned)
    keys, values = trial.keys, trial.values
    gone = int(SHAPE.head_dim * pruned)
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        thin = N + step - (N + step) % RESIDUAL
        if step % 7:
            continue
        for layer, head in np.ndindex(SHAPE.layers, SHAPE.q_heads):
            kv_head = head // SHAPE.group
            seen = keys[layer, kv_head].copy()
            seen[:thin, dropped(trial, layer, kv_head, gone)] = 0
            scores = seen @ q[layer, head] / np.sqrt(SHAPE.head_dim)
            weights = np.exp(scores - scores.max())
            expected = weights @ values[layer, kv_head] / weights.sum()
            np.testing.assert_allclose(trial.outs[layer][0, head, 0], expected, atol=1e-4)


def test_the_bytes_held_are_those_of_the_layout_and_fewer_than_full() -> None:
    trial = Trial("thinkkv", N, NEW, group=GROUP, residual=RESIDUAL, pruned=0.5)
    memory = trial.session.memory
    assert memory.packed is not None
    tensors = (*memory.hot.tensors(), *memory.packed.tensors(), *memory.spans.tensors())
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert memory.layout.bytes(SHAPE) == held == memory.account.resident
    method = methods.get("thinkkv")
    whole = Trial("thinkkv", N, NEW, group=GROUP, residual=RESIDUAL, pruned=0.0).session.memory.account.resident
    keys = memory.packed.form.rows(0, SHAPE.kv_heads)[0] * SHAPE.layers
    channels = SHAPE.head_dim // 2
    tables = SHAPE.layers * SHAPE.kv_heads * channels * 8
    assert whole - held == keys * channels * SHAPE.itemsize + tables
    assert held == method.floor_bytes(trial.session.method.params, SHAPE, N, NEW)


def test_nothing_pruned_is_exact() -> None:
    trial = Trial("thinkkv", N, 4, group=GROUP, residual=RESIDUAL, pruned=0.0)
    q, k = trial.step(0)
    keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (trial.keys, trial.values))
    scores = keys[1, 1] @ q[1, 5] / np.sqrt(SHAPE.head_dim)
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(trial.outs[1][0, 5, 0], weights @ values[1, 1] / weights.sum(), atol=1e-4)


def test_the_budget_decides_how_many_channels_go() -> None:
    parameters = methods.get("thinkkv").Parameters
    full = SHAPE.full_kv_bytes(1024 + 10)
    shares = [parameters.fit(SHAPE, 1023, 10, budget)["pruned"] for budget in (None, int(full * 0.7), int(full * 0.3))]
    assert shares == [0.4, pytest.approx(0.6, abs=0.011), 0.9]
