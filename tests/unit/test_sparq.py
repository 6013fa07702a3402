"""SparQ against its algorithm written out in float64, and what is recorded of a blended output."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial
from support import ListSink, run, task_prompt

from kvlens import methods

R, K, LOCAL, N, NEW = 5, 20, 6, 75, 20


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sparq(q: np.ndarray, keys: np.ndarray, values: np.ndarray, mean: bool) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Algorithm 1 for one KV head: q [G, D], keys and values [n, D] with the step's own token last -> positions
    attended, output [G, D], share a [G]."""
    best = np.argsort(-np.abs(q).sum(0))[:R]
    share = np.abs(q[:, best]).sum(1) / np.abs(q).sum(1)
    s = softmax(q[:, best] @ keys[:, best].T / np.sqrt(q.shape[1] * share)[:, None])
    order = s.sum(0)
    order[len(keys) - 1 - LOCAL :] = np.inf
    chosen = sorted(np.argsort(-order)[: K + 1].tolist())
    a = s[:, chosen].sum(1, keepdims=True) if mean else np.ones((len(q), 1))
    exact = softmax(q @ keys[chosen].T / np.sqrt(q.shape[1])) @ values[chosen]
    return chosen, a * exact + (1 - a) * values.mean(0), a[:, 0]


@pytest.mark.parametrize("mean", [True, False])
def test_every_step_is_algorithm_1(mean: bool) -> None:
    trial = Trial("sparq", N, NEW, components=R, tokens=K, local=LOCAL, page=8, mean_value=str(mean).lower())

    seen = Seen(trial.session).read
    keys, values = trial.keys.copy(), trial.values.copy()
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        for layer in range(SHAPE.layers):
            position, bias = seen[layer]
            for head in range(SHAPE.kv_heads):
                group = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
                chosen, out, _ = sparq(q[layer, group], keys[layer, head], values[layer, head], mean)
                for g in range(SHAPE.group):
                    assert sorted(position[head][bias[head, g] > -torch.inf].tolist()) == chosen, (step, layer, head)
                np.testing.assert_allclose(trial.outs[layer][0, group, 0], out, atol=1e-4)


def test_the_share_of_the_mean_value_is_recorded_and_its_masses_add_up(demo: Any) -> None:
    prompt, _ = task_prompt(demo, "multikey", 500, max_new=20)
    sink = ListSink()
    places = {"components": 8, "tokens": 32, "local": 8, "mean_value": "true"}
    run(demo, prompt, "sparq", overrides=places, max_new=20, sink=sink, coverage=True, ignore_eos=True)
    for record in sink.steps:
        mean = record.head["mass_mean"]
        assert (mean >= 0).all()
        assert mean.max() > 0.05, "nothing was left to the mean value, so this would show nothing"
        spans = np.where(record.top_span >= 0, record.top_mass, 0).sum(-1)
        assert (record.tail_mass >= mean - 1e-6).all(), "no span has what the mean value stands for"
        np.testing.assert_allclose(spans + record.tail_mass, 1, atol=1e-5)
        assert (record.kv["attended_tokens"] == 33).all()
        tokens = len(prompt.ids) + record.step
        index = (8 * tokens + demo.shape.head_dim) * 4
        assert (record.kv["read_bytes"] == 33 * demo.shape.head_token_bytes + index).all()


def test_where_query_heads_share_keys_the_mean_value_is_left_out() -> None:
    """As in the paper; a run that was stored when it was a switch keeps what it had."""
    alone, shared = (dataclasses.replace(SHAPE, q_heads=SHAPE.kv_heads * group) for group in (1, 3))
    for given, of_alone, of_shared in (("auto", True, False), ("true", True, True), (False, False, False)):
        params = methods.make_parameters(methods.get("sparq"), None, {"mean_value": given})
        assert (params.blends(alone), params.blends(shared)) == (of_alone, of_shared)
    sums = SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4
    floors = [
        methods.get("sparq").floor_bytes(
            methods.make_parameters(methods.get("sparq"), None, {"mean_value": m}), SHAPE, 99, 9
        )
        for m in ("true", "false")
    ]
    assert floors[0] - floors[1] == sums


def test_with_room_for_all_it_is_full_attention(demo: Any) -> None:
    prompt, _ = task_prompt(demo, "needle", 300, max_new=4)
    whole = run(demo, prompt, "full", max_new=4, keep_logits=True)
    mine = run(demo, prompt, "sparq", overrides={"tokens": 400}, max_new=4, keep_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.logits, mine.logits, strict=True))


@pytest.mark.parametrize(
    ("places", "says"), [({"local": 40, "tokens": 30}, "local"), ({"components": 0}, "components")]
)
def test_parameters_that_cannot_be_are_refused(places: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Trial("sparq", N, NEW, **places)
