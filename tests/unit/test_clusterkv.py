"""ClusterKV against its rules written out in float64: clusters by angle, tokens of the best, the last in part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial

from kvlens.methods import make_parameters
from kvlens.methods.clusterkv import ClusterKV, ClusterKVParameters
from kvlens.shape import KVShape

N, NEW, PAGE, SINKS, WINDOW, CLUSTER, ROOM, ROUNDS = 93, 40, 4, 3, 18, 7, 23, 5
SET = {"page": PAGE, "sinks": SINKS, "window": WINDOW, "cluster": CLUSTER, "rounds": ROUNDS, "dense_layers": 1}
SET["tokens"] = SINKS + WINDOW + ROOM
LEAVES = WINDOW // PAGE * PAGE


def clustered(keys: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """k-means of keys [n, D] by angle -> labels [n], centroids [k, D]."""
    drawn = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[:k].tolist()
    means = keys[drawn]

    def nearest() -> np.ndarray:
        return np.argmax(keys @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T, 1)

    for _ in range(ROUNDS):
        owner = nearest()
        means = np.array([keys[owner == c].mean(0) if (owner == c).any() else means[c] for c in range(k)])
    return nearest(), means


@pytest.mark.parametrize("group", ["mean", "max"])
def test_tokens_of_the_nearest_clusters_are_read_until_the_budget_is_full(group: str) -> None:
    trial = Trial("clusterkv", N, NEW, group=group, **SET)

    seen = Seen(trial.session).decided
    keys, upto = trial.keys[1], SINKS
    labels = [np.zeros(0, int) for _ in range(SHAPE.kv_heads)]
    means = [np.zeros((0, SHAPE.head_dim)) for _ in labels]
    for step in range(NEW):
        q, k = trial.step(step)
        keys = np.concatenate([keys, k[1][:, None]], 1)
        now = N + step + 1
        while now - upto > WINDOW:
            times = -(-(N + 1 - SINKS - WINDOW) // LEAVES) if step == 0 else 1
            until = upto + times * LEAVES
            for h in range(SHAPE.kv_heads):
                found, centroids = clustered(keys[h, upto:until], (until - upto) // CLUSTER)
                labels[h] = np.concatenate([labels[h], found + len(means[h])])
                means[h] = np.concatenate([means[h], centroids])
            upto = until
        bias, selection = seen[1]
        noted = next(n.values for n in trial.session.method.drain_journal() if n.layer == 1)
        for h in range(SHAPE.kv_heads):
            products = q[1, h * SHAPE.group : (h + 1) * SHAPE.group] @ means[h].T
            score = products.mean(0) if group == "mean" else products.max(0)
            order = [t for c in np.argsort(-score) for t in np.flatnonzero(labels[h] == c)]
            chosen = [SINKS + int(t) for t in order[:ROOM]]
            assert selection.rows[h].tolist() == chosen, (step, h)
            paged = score[labels[h]].reshape(-1, PAGE).max(1)
            np.testing.assert_allclose(selection.score[h, 2 : 2 + len(paged)], paged, atol=1e-4)
            assert selection.index_bytes == len(labels[h]) * 2 + len(means[h]) * SHAPE.head_dim * 4
            last = labels[h][order[ROOM - 1]]
            left = sum(labels[h][t] == last for t in order[ROOM:])
            whole = len({labels[h][t] for t in order[:ROOM]}) - (left > 0)
            assert (noted[h], noted[SHAPE.kv_heads + h]) == (whole, left)
            expected = sorted({*range(SINKS), *chosen, *range(upto, now)})
            for g in range(SHAPE.group):
                assert trial.attended(1, h * SHAPE.group + g, bias) == expected, (step, h)
    assert upto > N, "decoded tokens became clusters"


@pytest.mark.parametrize("bad", [{"cluster": 0}, {"window": 8}])
def test_bad_parameters_are_one_sentence(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^clusterkv: [^\n]*\.$"):
        make_parameters(ClusterKV, None, bad)


def test_centroids_take_no_more_of_a_small_budget_than_in_the_paper() -> None:
    """A fifth of the budget's tokens, a centroid being as large as half of one; where the budget is large enough a 13th
    of its tokens to a cluster. No budget is too small to say what it would take."""
    shape = KVShape(30, 9, 3, 64, 4)

    def cluster(share: float) -> int:
        return int(ClusterKVParameters.fit(shape, 1023, 65, int(share * shape.full_kv_bytes(1088)))["cluster"])

    for share in (0.05, 0.1, 0.15):
        assert 1088 / cluster(share) / 2 <= 1.05 * share * 1088 / 5
    assert (cluster(0.1), cluster(0.2), cluster(0.4)) == (25, 16, 33)
    assert cluster(0.0) == cluster(0.001) == 80
