"""InfLLM against its rules written out in float64: representatives, one choice for a layer, what is seen from afar."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial
from support import raises_code

from kvlens.methods import make_parameters
from kvlens.methods.infllm.method import InfLLM

N, NEW, PAGE, SINKS, WINDOW, CACHED, TOP, BEST = 93, 26, 8, 3, 10, 4, 2, 2
SET = {"page": PAGE, "sinks": SINKS, "window": WINDOW, "representatives": BEST, "dense_layers": 1}
SET["tokens"] = SINKS + WINDOW + CACHED * PAGE
HALF = SHAPE.head_dim // 2


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """x [..., m, D] as a rotary embedding of two halves turns it at positions [m], or [..., m]."""
    angle = np.asarray(positions)[..., None] * 50.0 ** (-np.arange(HALF) / HALF)
    a, b = x[..., :HALF], x[..., HALF:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def rotate(keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False) -> torch.Tensor:
    where = positions.numpy() * (-1 if back else 1)
    return torch.tensor(turned(keys.numpy().astype(np.float64), where), dtype=torch.float32)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(("group", "positions"), [("native", "far"), ("sum", "true")])
def test_blocks_are_found_by_their_most_attended_tokens_and_seen_from_afar(group: str, positions: str) -> None:
    trial = Trial("infllm", N, NEW, rotate=rotate, group=group, positions=positions, **SET)

    seen = Seen(trial.session).decided
    keys, values = trial.keys[1], trial.values[1]
    received = trial.received()[1].reshape(SHAPE.kv_heads, SHAPE.group, N)
    vectors: list[np.ndarray] = []
    cached: list[int] = []
    for step in range(NEW):
        q, k = trial.step(step)
        now = N + step + 1
        keys, values = (np.concatenate([old, k[1][:, None]], 1) for old in (keys, values))
        while now - SINKS - len(vectors) * PAGE > WINDOW + PAGE - 1:
            block = np.arange(SINKS + len(vectors) * PAGE, SINKS + (len(vectors) + 1) * PAGE)
            plain = turned(keys[:, block], -block)
            sums = received if group == "native" else np.broadcast_to(received.sum(1, keepdims=True), received.shape)
            best = np.argsort(-sums[:, :, block], -1)[..., :BEST]
            vectors.append(np.array([[plain[h, best[h, g]].mean(0) for g in range(SHAPE.group)] for h in range(2)]))
        asked = turned(turned(q[1][:, None], [-(now - 1)]), [WINDOW])[:, 0].reshape(SHAPE.kv_heads, SHAPE.group, -1)
        rank = np.array([(asked * vector).sum(-1).mean() for vector in vectors])
        top = np.argsort(-rank)[:TOP].tolist()
        cached = [*top, *(block for block in cached if block not in top)][:CACHED]
        bias, selection = seen[1]
        np.testing.assert_allclose(selection.score[0, 2 : 2 + len(rank)], rank, atol=1e-4)
        window = range(SINKS + len(vectors) * PAGE, now)
        blocks = [p for b in sorted(top) for p in range(SINKS + b * PAGE, SINKS + (b + 1) * PAGE)]
        expected = np.array([*range(SINKS), *blocks, *window])
        received = np.pad(received, ((0, 0), (0, 0), (0, 1)))
        near = np.maximum(expected, now - 1 - WINDOW) if positions == "far" else expected
        for h in range(SHAPE.kv_heads):
            assert set(selection.requested[h].tolist()) == {block + 2 for block in top}
            seen_keys = turned(keys[h, expected], near - expected)
            mine = q[1, h * SHAPE.group : (h + 1) * SHAPE.group]
            weights = softmax(mine @ seen_keys.T / SHAPE.head_dim**0.5)
            for g in range(SHAPE.group):
                assert trial.attended(1, h * SHAPE.group + g, bias) == expected.tolist(), (step, h)
            out = trial.outs[1][0, h * SHAPE.group : (h + 1) * SHAPE.group, 0]
            np.testing.assert_allclose(out, weights @ values[h, expected], atol=1e-4)
            received[h][:, expected] += weights
    assert len(vectors) * PAGE > N - WINDOW, "decoded tokens became blocks"
    assert (near != expected).any() == (positions == "far")
    there = trial.session.memory.spans.is_hot[1, 0].nonzero().flatten().tolist()
    assert set(there) == {block + 2 for block in cached}, "the least lately used gave way"


def test_what_it_needs_is_said_in_one_sentence() -> None:
    with raises_code("no_rotary_positions"):
        Trial("infllm", N, NEW, **SET)
    with pytest.raises(ValueError, match=r"^infllm: representatives [^\n]*\.$"):
        make_parameters(InfLLM, None, {"representatives": 0})
