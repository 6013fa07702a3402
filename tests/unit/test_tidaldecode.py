"""TidalDecode against plain formulas in float64: which positions a layer reads, and what comes out."""

from __future__ import annotations

import numpy as np
import pytest
from methodtrial import SHAPE, Trial

from kvlens import methods

N, NEW, TOKENS = 75, 40, 20


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and output of one query head."""
    scores = keys @ q / np.sqrt(SHAPE.head_dim)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights, weights @ values


@pytest.mark.parametrize("again", [0, 1])
def test_layers_behind_the_choosing_one_read_its_positions(again: int) -> None:
    trial = Trial("tidaldecode", N, NEW, tokens=TOKENS, select_layer=0, reselect_layer=again, page=8)
    keys, values = trial.keys, trial.values
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        if step % 7:
            continue
        for head in range(SHAPE.q_heads):
            kv_head = head // SHAPE.group
            weights, out = attend(q[0, head], keys[0, kv_head], values[0, kv_head])
            np.testing.assert_allclose(trial.outs[0][0, head, 0], out, atol=1e-4)
            chosen = [*np.argsort(-weights[:-1], kind="stable")[: TOKENS - 1], N + step]
            read = slice(None) if again == 1 else chosen
            _, out = attend(q[1, head], keys[1, kv_head, read], values[1, kv_head, read])
            np.testing.assert_allclose(trial.outs[1][0, head, 0], out, atol=1e-4)


def test_a_short_text_is_read_whole() -> None:
    trial = Trial("tidaldecode", 12, 4, tokens=TOKENS, select_layer=0, reselect_layer=0, page=8)
    q, k = trial.step(0)
    keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (trial.keys, trial.values))
    _, out = attend(q[1, 0], keys[1, 0], values[1, 0])
    np.testing.assert_allclose(trial.outs[1][0, 0, 0], out, atol=1e-4)


def test_the_bytes_held_are_those_announced() -> None:
    trial = Trial("tidaldecode", N, NEW, tokens=TOKENS, select_layer=0, reselect_layer=0, page=8)
    method = methods.get("tidaldecode")
    floor = method.floor_bytes(trial.session.method.params, SHAPE, N, NEW)
    assert trial.session.memory.account.resident == floor
    assert floor - trial.session.memory.layout.bytes(SHAPE) == SHAPE.q_heads * (N + NEW)


def test_layers_that_choose_keep_their_distance_in_the_fit() -> None:
    parameters = methods.get("tidaldecode").Parameters
    for layers, expected in ((32, (2, 9)), (16, (1, 4)), (2, (0, 1))):
        shape = type(SHAPE)(layers=layers, q_heads=4, kv_heads=2, head_dim=16, itemsize=2)
        fitted = parameters.fit(shape, 1023, 10, None)
        assert (fitted["select_layer"], fitted["reselect_layer"], fitted["tokens"]) == (*expected, 128)
