"""RetroInfer against its rules written out in float64: clusters, zones, what is read, and what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import raises_code

from kvlens.methods import get, make_parameters
from kvlens.methods.families import cluster_entries
from kvlens.methods.retroinfer import RetroInferParameters
from kvlens.refusal import Refusal

N, NEW, SINKS, WINDOW, SEGMENT, CLUSTER, ROOM, ROUNDS = 93, 40, 3, 8, 16, 4, 13, 5
EACH = SEGMENT // CLUSTER
SET: dict[str, Any] = {"sinks": SINKS, "window": WINDOW, "page": SEGMENT, "cluster": CLUSTER, "rounds": ROUNDS}
SET |= {"retrieval": 0.1, "estimation": 0.3, "tokens": SINKS + WINDOW + ROOM}


def labels_of(keys: np.ndarray) -> np.ndarray:
    """k-means of a segment's centred keys [n, D] by angle."""
    drawn = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[:EACH].tolist()
    means = keys[drawn]

    def nearest() -> np.ndarray:
        return np.argmax(keys @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T, 1)

    for _ in range(ROUNDS):
        owner = nearest()
        means = np.array([keys[owner == c].mean(0) if (owner == c).any() else means[c] for c in range(EACH)])
    return nearest()


class Oracle:
    """The wave index and the block cache of one (layer, KV head)."""

    def __init__(self) -> None:
        self.label = np.zeros(0, int)
        self.used: dict[int, int] = {}
        self.refused = 0

    def enter(self, keys: np.ndarray) -> None:
        """keys of whole segments, which are centred together."""
        centred = keys - keys.mean(0)
        for start in range(0, len(keys), SEGMENT):
            clusters = len(self.label) // SEGMENT * EACH
            self.label = np.concatenate([self.label, labels_of(centred[start : start + SEGMENT]) + clusters])

    def zones(self, q: np.ndarray, keys: np.ndarray, step: int) -> tuple[list[int], list[int], set[int]]:
        """q [G, D] -> clusters that are read exactly and through their entries, and those on the device."""
        present = [c for c in range(len(self.label) // SEGMENT * EACH) if (self.label == c).any()]
        centroids = np.array([keys[self.label == c].mean(0) for c in present])
        logits = np.exp(q @ centroids.T / np.sqrt(SHAPE.head_dim))
        score = (logits / logits.sum(1, keepdims=True)).sum(0)
        order = [present[i] for i in np.argsort(-score, kind="stable")]
        count = len(self.label) // SEGMENT * EACH
        first, exact, tokens = max(1, round(count * 0.1)), [], 0
        for cluster in order[:first]:
            size = (self.label == cluster).sum()
            if tokens + size > ROOM:
                self.refused += 1
            else:
                tokens += size
                exact.append(cluster)
        estimated = [c for c in order[: first + round(count * 0.3)] if c not in exact]
        self.used |= dict.fromkeys(exact, step)
        kept, tokens = {}, 0
        for cluster in sorted(self.used, key=lambda c: (-self.used[c], c)):
            tokens += (self.label == cluster).sum()
            if tokens <= ROOM:
                kept[cluster] = self.used[cluster]
        self.used = kept
        return exact, estimated, set(kept)


def test_zones_estimates_and_cache_are_those_of_the_rules() -> None:
    trial = Trial("retroinfer", N, NEW, **SET)
    keys, values, reused, decoded_clusters = trial.keys, trial.values, 0, 0
    oracles = [[Oracle() for _ in range(SHAPE.kv_heads)] for _ in range(SHAPE.layers)]
    upto, ring = SINKS, WINDOW + SEGMENT - 1
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        now = N + step + 1
        times = -(-max(0, now - upto - ring) // SEGMENT)
        for layer in range(SHAPE.layers):
            for h in range(SHAPE.kv_heads):
                oracle, until = oracles[layer][h], upto + times * SEGMENT
                if times:
                    oracle.enter(keys[layer, h, upto:until])
                clustered = slice(SINKS, until)
                group = q[layer, h * SHAPE.group : (h + 1) * SHAPE.group]
                exact, estimated, held = oracle.zones(group, keys[layer, h, clustered], step)
                label = oracle.label
                on_device = [SINKS + t for t in range(len(label)) if label[t] in held]
                assert trial.lies(layer, h)[0] == 0
                assert set(on_device) <= set(trial.lies(layer, h))
                reused += len(held - set(exact))
                tokens = [*range(SINKS), *(SINKS + t for t in range(len(label)) if label[t] in exact)]
                tokens += range(until, now)
                for g, query in enumerate(group):
                    weight = list(np.exp(keys[layer, h, tokens] @ query / np.sqrt(SHAPE.head_dim)))
                    given = list(values[layer, h, tokens])
                    for c in estimated:
                        members = np.flatnonzero(label == c) + SINKS
                        centroid = keys[layer, h, members].mean(0)
                        weight.append(len(members) * np.exp(centroid @ query / np.sqrt(SHAPE.head_dim)))
                        given.append(values[layer, h, members].mean(0))
                    out = np.array(weight) @ np.array(given) / np.sum(weight)
                    seen = trial.outs[layer][0, h * SHAPE.group + g, 0]
                    np.testing.assert_allclose(seen, out, atol=1e-4, err_msg=str((step, layer, h)))
        if times:
            upto += times * SEGMENT
        decoded_clusters = upto - N
    assert decoded_clusters > 0, "decoded tokens became clusters"
    assert reused, "the block cache held clusters that were not read"
    assert any(oracle.refused for heads in oracles for oracle in heads), "a cluster had no room"


@pytest.mark.parametrize("dense", [0, 1])
def test_the_bytes_held_are_those_announced(dense: int) -> None:
    trial = Trial("retroinfer", N, NEW, **{**SET, "dense_layers": dense})
    floor = get("retroinfer").floor_bytes(trial.session.method.params, SHAPE, N, NEW)
    for step in range(NEW):
        trial.step(step)
    assert trial.session.memory.account.peak <= floor
    leaving = SEGMENT * SHAPE.token_bytes
    assert trial.session.memory.account.resident == floor - leaving


def test_clusters_that_labels_do_not_tell_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_entries, "MOST_CLUSTERS", 28)
    Trial("retroinfer", N, NEW, **SET)
    with raises_code("too_many_clusters", Refusal, clusters=28 + EACH, most=28):
        Trial("retroinfer", N + SEGMENT, NEW, **SET)
    paper = RetroInferParameters()
    assert paper.misfit(500_000) is None
    assert paper.misfit(600_000) is not None


@pytest.mark.parametrize("bad", [{"cluster": 3}, {"cluster": 0}, {"retrieval": 0.0}, {"estimation": 1.5}])
def test_bad_parameters_are_one_sentence(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^retroinfer: [^\n]*\.$"):
        make_parameters(get("retroinfer"), None, bad)
