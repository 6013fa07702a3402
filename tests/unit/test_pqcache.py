"""PQCache against its rules written out in float64: codes, approximate weights, the best tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial
from support import raises_code

from kvlens.methods import make_parameters
from kvlens.methods.pqcache import PQCache

N, NEW, PAGE, SINKS, WINDOW, ROOM, ROUNDS, PARTS, BITS = 93, 26, 4, 3, 9, 12, 4, 3, 3
SET = {"page": PAGE, "sinks": SINKS, "window": WINDOW, "rounds": ROUNDS, "parts": PARTS, "bits": BITS}
SET["tokens"] = SINKS + WINDOW + ROOM


def nearest(x: np.ndarray, means: np.ndarray) -> np.ndarray:
    return ((x[:, None] - means) ** 2).sum(-1).argmin(1)


def centroids(x: np.ndarray) -> np.ndarray:
    means = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: 2**BITS].tolist()]
    for _ in range(ROUNDS):
        owner = nearest(x, means)
        means = np.array([x[owner == c].mean(0) if (owner == c).any() else means[c] for c in range(len(means))])
    return means


@pytest.mark.parametrize("group", ["sum", "max"])
def test_the_tokens_whose_coded_keys_score_highest_are_brought(group: str) -> None:
    trial = Trial("pqcache", N, NEW, group=group, **SET)

    seen = Seen(trial.session).decided
    keys, ring, coded = trial.keys[1], WINDOW + PAGE // 2, {}
    for step in range(NEW):
        q, k = trial.step(step)
        keys = np.concatenate([keys, k[1][:, None]], 1)
        now = N + step + 1
        upto = SINKS + -(-(now - SINKS - ring) // PAGE) * PAGE
        bias, selection = seen[1]
        for h in range(SHAPE.kv_heads):
            parts = np.split(keys[h, SINKS:upto], PARTS, axis=1)
            if step == 0:
                coded[h] = [centroids(part) for part in parts]
            rough = np.concatenate([m[nearest(x, m)] for x, m in zip(parts, coded[h], strict=True)], 1)
            scores = q[1, h * SHAPE.group : (h + 1) * SHAPE.group] @ rough.T / SHAPE.head_dim**0.5
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            weights = weights.sum(0) if group == "sum" else weights.max(0)
            chosen = np.sort(weights)[-ROOM:]
            rows = selection.rows[h].numpy() - SINKS
            np.testing.assert_allclose(np.sort(weights[rows]), chosen, rtol=1e-4, err_msg=str((step, h)))
            assert len(set(rows.tolist())) == ROOM
            assert selection.index_bytes == len(weights) * PARTS + 2**BITS * SHAPE.head_dim * 4
            paged = np.log(weights).reshape(-1, PAGE).max(1)
            np.testing.assert_allclose(selection.score[h, 2 : 2 + len(paged)], paged, atol=1e-4)
            expected = sorted({*range(SINKS), *(rows + SINKS).tolist(), *range(upto, now)})
            for g in range(SHAPE.group):
                assert trial.attended(1, h * SHAPE.group + g, bias) == expected, (step, h)
    assert upto > N, "decoded tokens were coded"


def test_what_cannot_be_is_one_sentence() -> None:
    with raises_code("parts_do_not_divide", parts=5):
        Trial("pqcache", N, NEW, **{**SET, "parts": 5})
    with pytest.raises(ValueError, match=r"^pqcache: parts and [^\n]*\.$"):
        make_parameters(PQCache, None, {"bits": 9})
