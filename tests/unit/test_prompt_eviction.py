"""Prompt evictions against dense formulas in float64: which tokens stay, and what is logged of those that go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial

from kvlens.memory.log import cuts
from kvlens.memory.placement import Kept

WINDOW, TOKENS, N = 11, 37, 203


def best(score: np.ndarray, count: int) -> list[int]:
    return sorted(np.argsort(-score, kind="stable")[:count].tolist())


def window_scores(trial: Trial, layer: int, head: int, window: int, kernel: int, pool: str) -> np.ndarray:
    """SnapKV's Listing 1 for one query head: the window ends with the peeked token."""
    q = np.concatenate([trial.queries[layer, head], trial.last_q[layer, head]])[-window:]
    k = np.concatenate([trial.keys[layer, head // SHAPE.group], trial.last_k[layer, head // SHAPE.group]])
    scores = q @ k.T / SHAPE.head_dim**0.5
    n = len(k)
    scores[np.triu_indices(window, n - window + 1, n)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    votes = (weights / weights.sum(-1, keepdims=True))[:, : n - window].sum(0)
    half = kernel // 2
    if pool == "max":
        return np.array([votes[max(0, i - half) : i + half + 1].max() for i in range(len(votes))])
    padded = np.pad(votes, half)
    return np.array([padded[i : i + kernel].mean() for i in range(len(votes))])


@pytest.mark.parametrize(("pool", "kernel", "group"), [("max", 7, "mean"), ("avg", 5, "max"), ("avg", 1, "sum")])
def test_snapkv_keeps_what_the_window_attends_to(pool: str, kernel: int, group: str) -> None:
    trial = Trial("snapkv", N, 5, window=WINDOW, tokens=TOKENS, kernel=kernel, pool=pool, group=group)
    agree = {"mean": np.mean, "max": np.max, "sum": np.sum}[group]
    for layer in range(SHAPE.layers):
        for kv_head in range(SHAPE.kv_heads):
            heads = range(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group)
            score = agree([window_scores(trial, layer, head, WINDOW, kernel, pool) for head in heads], axis=0)
            expected = best(score, TOKENS - WINDOW)
            assert trial.lies(layer, kv_head) == [*expected, *range(N + 1 - WINDOW, N)]


def test_keydiff_keeps_the_keys_least_like_the_others() -> None:
    trial = Trial("keydiff", N, 5, tokens=TOKENS)
    for layer in range(SHAPE.layers):
        for kv_head in range(SHAPE.kv_heads):
            keys = trial.keys[layer, kv_head]
            unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
            anchor = unit.mean(0)
            score = -(unit @ anchor) / np.linalg.norm(anchor)
            assert trial.lies(layer, kv_head) == best(score, TOKENS)


def test_random_keeps_the_window_and_as_many_others_anywhere_in_the_prompt() -> None:
    trial, again = (Trial("random", N, 5, window=WINDOW, tokens=TOKENS) for _ in range(2))
    heads = [(layer, kv_head) for layer in range(SHAPE.layers) for kv_head in range(SHAPE.kv_heads)]
    chosen = [trial.lies(*head) for head in heads]
    assert chosen == [again.lies(*head) for head in heads], "the same seed, the same tokens"
    assert len({tuple(kept) for kept in chosen}) == len(chosen), "every KV head draws for itself"
    for kept in chosen:
        assert len(kept) == TOKENS
        assert kept[-WINDOW:] == list(range(N - WINDOW, N))
    drawn = np.concatenate([kept[:-WINDOW] for kept in chosen])
    assert abs(drawn.mean() / (N - WINDOW) - 0.5) < 4 / np.sqrt(12 * len(drawn)), "no part of the prompt is preferred"


def test_what_is_dropped_is_logged_with_rank_and_cut() -> None:
    trial = Trial("keydiff", N, 5, tokens=TOKENS)
    rows = {(row.layer, row.kv_head): row for row in trial.session.memory.log.take_cuts()}
    assert len(rows) == SHAPE.layers * SHAPE.kv_heads
    for (layer, kv_head), row in rows.items():
        kept = set(trial.lies(layer, kv_head))
        keys = trial.keys[layer, kv_head]
        unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        score = -(unit @ unit.mean(0)) / np.linalg.norm(unit.mean(0))
        assert (row.candidates, row.kept) == (N, TOKENS)
        assert row.cut == pytest.approx(min(score[list(kept)]), abs=1e-5)
        order = np.argsort(-score, kind="stable")
        for span, dropped, pos, rank in zip(row.span, row.dropped, row.pos, row.rank, strict=True):
            inside = range((span - 1) * 16, min(span * 16, N))
            gone = [p for p in inside if p not in kept]
            assert (len(gone), max(gone, key=lambda p: score[p])) == (dropped, pos)
            assert order[rank - 1] == pos
            assert rank > TOKENS


def test_kept_tokens_may_differ_in_number_by_layer_and_head() -> None:
    ragged = Kept.ragged([[torch.tensor([1, 4]), torch.tensor([2])], [torch.tensor([0]), torch.tensor([0, 1, 5])]])
    assert ragged.select(slice(0, 1), slice(0, 2)).tolist() == [[[1, 4], [2, -1]]]
    assert ragged.select(slice(0, 2), slice(1, 2)).tolist() == [[[2, -1, -1]], [[0, 1, 5]]]
    assert ragged.mask(6).sum(-1).tolist() == [[2, 1], [1, 3]]
    again = Kept.masked(ragged.mask(6))
    assert torch.equal(again.positions, ragged.positions)


def test_a_cut_speaks_once_for_heads_that_are_alike() -> None:
    score = torch.tensor([[[0.4, 0.1, float("nan"), 0.3]]])
    kept = Kept(torch.tensor([[[0, 2]]]), score)
    (row,) = cuts(kept, torch.tensor([1, 1, 2, 2]), -1)
    assert (row.layer, row.kv_head, row.candidates, row.kept) == (None, None, 3, 1)
    assert row.cut == pytest.approx(0.4)
    assert (row.span.tolist(), row.dropped.tolist(), row.pos.tolist(), row.rank.tolist()) == (
        [1, 2],
        [1, 1],
        [1, 3],
        [3, 2],
    )
