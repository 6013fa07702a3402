"""Attention Matching against plain formulas in float64: chosen tokens, weights, values, and what a step's attention
gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import random_llama, run

from kvlens import methods
from kvlens.checking.models import random_prompt
from kvlens.methods.attention_matching import compacted, nonnegative
from kvlens.methods.kvzip import OPENING

N, ENTRIES, SINKS, WINDOW, REFERENCES = 150, 37, 3, 11, 40


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_the_weights_are_the_nonnegative_least_squares() -> None:
    """Optimality: the gradient is 0 where a weight is free and not negative where it is at its bound."""
    rows = torch.tensor(np.random.default_rng(0).random((60, 9)))
    rows[:, 4] = 3 * rows[:, 2]  # one of the two suffices
    target = rows[:, :4] @ torch.tensor([0.5, 2.0, 0.7, 0.0], dtype=torch.float64) - 0.3 * rows[:, 7]
    weights = nonnegative(rows, target)
    slope = rows.mT @ (rows @ weights - target)
    free = weights > 1e-3 + 1e-9
    assert float(slope[free].abs().max()) < 2e-2
    assert float(slope[~free].min()) > -2e-2
    assert bool((weights >= 1e-3).all())
    assert not bool(free[7])


@pytest.mark.parametrize("fitted", ["both", "weights", "nothing"])
def test_each_fit_brings_entries_nearer_to_all_tokens(fitted: str) -> None:
    rng = np.random.default_rng(1)
    queries, keys, values = (torch.tensor(rng.standard_normal((m, 16))) for m in (90, 120, 120))
    place, weights, made, (mass, output) = compacted(queries, keys, values, 30, fitted)
    attention = softmax(queries.numpy() @ keys.numpy().T / 4)
    best = np.sort(np.argsort(-np.sqrt((attention**2).mean(0)), kind="stable")[:30])
    assert place.tolist() == best.tolist()
    compact = attention[:, best] * weights.numpy()
    assert float(mass) == pytest.approx(np.sqrt(((compact.sum(-1) - 1) ** 2).mean()))
    compact /= compact.sum(-1, keepdims=True)
    exact = attention @ values.numpy()
    error = np.linalg.norm(compact @ made.numpy() - exact) / np.linalg.norm(exact)
    assert float(output) == pytest.approx(error)
    plain = compacted(queries, keys, values, 30, "nothing")[3]
    if fitted != "nothing":
        assert float(mass) < 0.4 * float(plain[0])
    if fitted == "both":
        assert float(output) < 0.5 * float(compacted(queries, keys, values, 30, "weights")[3][1])
    if fitted == "nothing":
        assert weights.tolist() == [1.0] * 30
        torch.testing.assert_close(made, values[place])


def test_a_step_attends_the_entries_with_their_weights() -> None:
    settings = {"entries": ENTRIES, "sinks": SINKS, "window": WINDOW, "references": REFERENCES, "page": 8}
    trial = Trial("attention_matching", N, 5, reading="prompt", **settings)
    q, k = trial.step(0)
    until = N - WINDOW
    for layer, kv_head in np.ndindex(SHAPE.layers, SHAPE.kv_heads):
        heads = slice(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group)
        references = torch.tensor(trial.queries[layer, heads, -REFERENCES:].reshape(-1, SHAPE.head_dim))
        keys, values = (torch.tensor(x[layer, kv_head, SINKS:until]) for x in (trial.keys, trial.values))
        place, weights, made, _ = compacted(references, keys, values, ENTRIES, "both")
        exact = [*range(SINKS), *range(until, N)]
        seen = np.vstack([trial.keys[layer, kv_head, exact], keys[place].numpy(), k[layer, kv_head][None]])
        given = np.vstack([trial.values[layer, kv_head, exact], made.numpy(), k[layer, kv_head][None]])
        bias = np.concatenate([np.zeros(len(exact)), np.log(weights.numpy()), np.zeros(1)])
        for head in range(heads.start, heads.stop):
            expected = softmax(seen @ q[layer, head] / np.sqrt(SHAPE.head_dim) + bias) @ given
            np.testing.assert_allclose(trial.outs[layer][0, head, 0], expected, atol=2e-3)


def test_the_references_come_from_a_second_reading() -> None:
    model, prompt = random_llama(2), random_prompt(91)
    settings = {"entries": 30, "references": 24, "window": 5}
    result = run(model, prompt, "attention_matching", max_new=3, overrides=settings)
    assert result.second_reading[0] == 90 + len(model.tokenizer.encode(OPENING))
    plain = run(model, prompt, "attention_matching", max_new=3, overrides={**settings, "reading": "prompt"})
    assert plain.second_reading == (0, 0.0)


def test_more_references_than_a_run_keeps_queries_are_refused() -> None:
    """A prompt that several runs share holds as many."""
    method = methods.get("attention_matching")
    assert methods.make_parameters(method, None, {"reading": "prompt", "references": 256}).references == 256
    assert methods.make_parameters(method, None, {"references": 512}).references == 512
    with pytest.raises(ValueError, match="256"):
        methods.make_parameters(method, None, {"reading": "prompt", "references": 512})


def test_without_a_budget_every_token_stays() -> None:
    model, prompt = random_llama(2), random_prompt(61)
    whole = run(model, prompt, "full", max_new=5)
    assert run(model, prompt, "attention_matching", max_new=5).ids == whole.ids
