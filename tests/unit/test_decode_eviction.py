"""H2O and StreamingLLM against plain lists in float64, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial

from kvlens.kernels.attend import add_received

PLACES, RECENT, N, NEW = 29, 13, 101, 40


class Heavy:
    """H2O's Algorithm 1 for one KV head: keys and sums by position, in a dictionary."""

    def __init__(self, trial: Trial, layer: int, kv_head: int, group: str) -> None:
        self.agree = {"mean": np.mean, "max": np.max, "sum": np.sum}[group]
        heads = slice(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group)
        sums = self.agree(trial.received()[layer, heads], axis=0)
        keys = trial.keys[layer, kv_head]
        recent = list(range(N - RECENT + 1, N))
        heavy = sorted(range(N - RECENT + 1), key=lambda p: (-sums[p], p))[: PLACES - 1 - len(recent)]
        self.sums = {p: sums[p] for p in sorted(heavy) + recent}
        self.keys = {p: keys[p] for p in self.sums}
        self.evicted: list[tuple[int, float]] = []

    def step(self, position: int, q: np.ndarray, k: np.ndarray) -> None:
        if len(self.sums) == PLACES:
            able = [p for p in self.sums if p <= position - RECENT]
            victim = min(able, key=lambda p: self.sums[p])
            self.evicted.append((victim, self.sums[victim]))
            del self.sums[victim], self.keys[victim]
        self.sums[position], self.keys[position] = 0.0, k
        order = sorted(self.keys)
        scores = q @ np.array([self.keys[p] for p in order]).T / SHAPE.head_dim**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        for p, received in zip(order, self.agree(weights, axis=0), strict=True):
            self.sums[p] += received


def test_attention_received_while_the_prompt_is_read_in_parts_is_the_column_sum() -> None:
    """Causal softmax of all queries, whole in float64: chunks of 40, 61 queries, blocks of 16 within them."""
    trial = Trial("h2o", N, NEW, tokens=PLACES)
    expected = trial.received()
    for layer in range(SHAPE.layers):
        found = torch.zeros(SHAPE.q_heads, N)
        q, keys = (torch.tensor(x[layer], dtype=torch.float32) for x in (trial.queries, trial.keys))
        for start, end in ((0, 40), (40, N)):
            add_received(found, q[:, start:end], keys[:, :end], SHAPE.head_dim**-0.5, rows=16)
        np.testing.assert_allclose(found.numpy(), expected[layer], atol=1e-4)


@pytest.mark.parametrize("group", ["sum", "max"])
def test_h2o_evicts_the_smallest_sum_beside_the_newest(group: str) -> None:
    trial = Trial("h2o", N, NEW, tokens=PLACES, recent=RECENT, group=group)
    expected = {(x, h): Heavy(trial, x, h, group) for x in range(SHAPE.layers) for h in range(SHAPE.kv_heads)}
    logged = []
    for step in range(NEW):
        q, k = trial.step(step)
        for (layer, head), heavy in expected.items():
            heads = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
            heavy.step(N + step, q[layer, heads], k[layer, head])
            assert trial.lies(layer, head) == sorted(heavy.sums), (step, layer, head)
        logged += [row for row in trial.session.memory.log.take_cuts() if row.step >= 0]
    for (layer, head), heavy in expected.items():
        rows = [row for row in logged if (row.layer, row.kv_head) == (layer, head)]
        assert [int(row.pos[0]) for row in rows] == [victim for victim, _ in heavy.evicted]
        np.testing.assert_allclose([row.score[0] for row in rows], [score for _, score in heavy.evicted], atol=1e-4)
        assert all(row.cut >= row.score[0] and row.rank[0] == row.candidates for row in rows)


def test_streaming_llm_keeps_sinks_and_the_newest_and_logs_every_token_it_evicts() -> None:
    trial = Trial("streaming_llm", N, NEW, tokens=PLACES, sinks=4)
    rows = trial.session.memory.log.take_cuts()
    for step in range(NEW):
        trial.step(step)
        rows += trial.session.memory.log.take_cuts()
        newest = range(N + step + 1 - (PLACES - 4), N + step + 1)
        for layer in range(SHAPE.layers):
            assert trial.lies(layer, 1) == [0, 1, 2, 3, *newest]
    assert all((row.layer, row.kv_head) == (None, None) for row in rows)
    gone = [int(row.pos[0]) for row in rows]
    assert gone == list(range(gone[0], N + NEW - (PLACES - 4)))
    assert gone[0] == N - (PLACES - 5)
    assert all(np.isnan(row.score[0]) for row in rows)


def test_a_span_thins_out_and_is_gone_at_its_last_token() -> None:
    trial = Trial("streaming_llm", N, NEW, tokens=PLACES, sinks=4, page=8)
    for step in range(NEW):
        trial.step(step)
    memory = trial.session.memory
    kinds: dict[int, list[str]] = {}
    for event in memory.log:
        if event.kind in ("thin", "evict") and event.step >= 0:
            kinds.setdefault(event.span, []).append(event.kind)
    row = {span.span: span for span in memory.spans.rows}
    left = set(trial.lies(0, 0))
    for span, seen in kinds.items():
        inside = range(row[span].tok_start, row[span].tok_end)
        assert seen[-1] == ("thin" if left & set(inside) else "evict")
    decoded = [span for span in row.values() if span.tok_start >= N and span.kind != "window"]
    assert decoded
    assert all(span.tok_end - span.tok_start == 8 for span in decoded)


def shares(trial: Trial, layer: int, q: np.ndarray, keys: dict[int, np.ndarray]) -> np.ndarray:
    """Mean over all query heads of a layer of the attention q [Hq, D] pays: keys by position [H_kv, D] -> [positions]
    in ascending order."""
    order = sorted(keys)
    found = np.zeros(len(order))
    for head in range(SHAPE.q_heads):
        scores = np.array([keys[p][head // SHAPE.group] for p in order]) @ q[head] / SHAPE.head_dim**0.5
        weights = np.exp(scores - scores.max())
        found += weights / weights.sum() / SHAPE.q_heads
    return found


def test_tova_evicts_what_the_newest_query_attends_to_least_in_a_whole_layer() -> None:
    trial = Trial("tova", N, NEW, tokens=PLACES)
    lying, worth = [], []
    for layer in range(SHAPE.layers):
        prompt = {p: trial.keys[layer, :, p] for p in range(N)}
        last = shares(trial, layer, trial.queries[layer, :, N - 1], prompt)
        first = sorted(range(N), key=lambda p: (-last[p], p))[: PLACES - 1]
        lying.append({p: prompt[p] for p in first})
        worth.append(dict(enumerate(last)))
    assert trial.lies(0, 0) != trial.lies(1, 0)
    for step in range(NEW):
        q, k = trial.step(step)
        for layer, keys in enumerate(lying):
            if len(keys) == PLACES:
                able = [p for p in keys if p < N + step]
                del keys[min(able, key=lambda p: worth[layer][p])]
            keys[N + step] = k[layer]
            worth[layer] = dict(zip(sorted(keys), shares(trial, layer, q[layer], keys), strict=True))
            for kv_head in range(SHAPE.kv_heads):
                assert trial.lies(layer, kv_head) == sorted(keys), (step, layer)
