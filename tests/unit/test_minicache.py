"""MiniCache against plain formulas in float64: the shared direction, what stays exact, and what a step attends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial

from kvlens import methods
from kvlens.quantised.merged import between

N, NEW, GROUP, RESIDUAL = 75, 40, 8, 16


def slerp(a: np.ndarray, b: np.ndarray, part: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors on the arc between the directions of rows, and the angles."""
    a, b = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    angle = np.arccos(np.clip((a * b).sum(-1), -1, 1))[:, None]
    return (np.sin((1 - part) * angle) * a + np.sin(part * angle) * b) / np.sin(angle), angle[:, 0]


def test_the_shared_direction_is_on_the_arc() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50, 12))
    units = [torch.tensor(x / np.linalg.norm(x, axis=-1, keepdims=True)) for x in (a, b)]
    angle = (units[0] * units[1]).sum(-1).arccos()
    for part in (0.0, 0.6, 1.0):
        found = between(*units, angle, part).numpy()
        np.testing.assert_allclose(found, slerp(a, b, part)[0], atol=1e-9)
        np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-9)
    same = between(units[0], units[0], torch.zeros(50), 0.6)
    torch.testing.assert_close(same, units[0])


def merged(lower: np.ndarray, upper: np.ndarray, part: float, share: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Rows [n, D] of both layers as they come back, and the smallest angle that stayed exact."""
    direction, angle = slerp(lower, upper, part)
    both = [direction * np.linalg.norm(x, axis=-1, keepdims=True) for x in (lower, upper)]
    best = np.argsort(-angle, kind="stable")[: math.ceil(share * len(lower))]
    both[0][best], both[1][best] = lower[best], upper[best]
    return both[0], both[1], float(angle[best].min()) if len(best) else np.inf


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_step_attends_what_two_layers_share(share: float) -> None:
    trial = Trial("minicache", N, NEW, group=GROUP, residual=RESIDUAL, begin=0.0, part=0.6, exact=share)
    q, k = trial.step(0)
    keys_until, values_until = N - N % RESIDUAL, N - RESIDUAL
    for kv_head in range(SHAPE.kv_heads):
        keys, values = trial.keys[:, kv_head].copy(), trial.values[:, kv_head].copy()
        keys[0, :keys_until], keys[1, :keys_until], _ = merged(*keys[:, :keys_until], 0.6, share)
        values[0, :values_until], values[1, :values_until], _ = merged(*values[:, :values_until], 0.6, share)
        for layer in range(SHAPE.layers):
            seen = np.vstack([keys[layer], k[layer, kv_head][None]])
            given = np.vstack([values[layer], k[layer, kv_head][None]])
            for head in range(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group):
                scores = seen @ q[layer, head] / np.sqrt(SHAPE.head_dim)
                weights = np.exp(scores - scores.max())
                np.testing.assert_allclose(trial.outs[layer][0, head, 0], weights @ given / weights.sum(), atol=5e-3)


@pytest.mark.parametrize(("begin", "exact"), [(0.0, 0.1), (0.0, 0.0), (0.5, 0.1), (1.0, 0.1)])
def test_the_bytes_held_are_those_of_the_layout(begin: float, exact: float) -> None:
    trial = Trial("minicache", N, NEW, group=GROUP, residual=RESIDUAL, begin=begin, exact=exact)
    memory = trial.session.memory
    for step in range(NEW):
        trial.step(step)
    assert memory.packed is not None
    tensors = (*memory.hot.tensors(), *memory.packed.tensors(), *memory.spans.tensors())
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    floor = methods.get("minicache").floor_bytes(trial.session.method.params, SHAPE, N, NEW)
    assert memory.layout.bytes(SHAPE) == held == floor


def test_layers_without_a_partner_are_exact() -> None:
    """Two layers, of which the second alone could be merged."""
    trial = Trial("minicache", N, NEW, group=GROUP, residual=RESIDUAL, begin=0.5)
    q, k = trial.step(0)
    keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (trial.keys, trial.values))
    for layer in range(SHAPE.layers):
        scores = keys[layer, 1] @ q[layer, 4] / np.sqrt(SHAPE.head_dim)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(trial.outs[layer][0, 4, 0], weights @ values[layer, 1] / weights.sum(), atol=1e-4)
