"""A threshold in place of a budget against plain formulas in float64: which tokens stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methodtrial import SHAPE, Trial
from test_prompt_eviction import window_scores

from kvlens import methods
from kvlens.methods.composition import SENSELESS, NoComposition

N, WINDOW, LEAST = 203, 11, 1


def expected(
    trial: Trial, score: Any, end: int, cut: float, tail: int, total: int | None = None
) -> dict[Any, list[int]]:
    """Positions that each KV head keeps: score(layer, KV head) float64 [end]; tail: the window's tokens."""
    margins = {}
    for layer in range(SHAPE.layers):
        rows = np.array([score(layer, head) for head in range(SHAPE.kv_heads)])
        for head, row in enumerate((rows - rows.mean()) / rows.std(ddof=1) - cut):
            margins[layer, head] = row
    if total is not None:
        forced = {place: np.where(np.arange(end) == row.argmax(), np.inf, row) for place, row in margins.items()}
        best = np.argsort(-np.concatenate(list(forced.values())), kind="stable")[:total]
        counts = dict(zip(margins, np.bincount(best // end, minlength=len(margins)), strict=True))
    else:
        counts = {place: max(LEAST, int((row >= 0).sum())) for place, row in margins.items()}
    return {
        place: sorted(np.argsort(-row, kind="stable")[: counts[place]].tolist()) + list(range(end, end + tail))
        for place, row in margins.items()
    }


def kept(trial: Trial) -> dict[Any, list[int]]:
    return {(x, h): trial.lies(x, h) for x in range(SHAPE.layers) for h in range(SHAPE.kv_heads)}


@pytest.mark.parametrize("cut", [0.5, -1.0, 9.0])
def test_tokens_stay_by_their_own_score(cut: float) -> None:
    """The window ends with the peeked token, whose slot is not written yet."""
    trial = Trial("scorecut", N, 5, window=WINDOW, cut=cut)

    def score(layer: int, kv_head: int) -> np.ndarray:
        heads = range(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group)
        return np.mean([window_scores(trial, layer, head, WINDOW, 7, "max") for head in heads], 0)

    assert kept(trial) == expected(trial, score, N - WINDOW + 1, cut, WINDOW - 1)


def norms(trial: Trial) -> Any:
    """A score of no query: minus the cosine to the mean key's direction, KeyDiff's."""

    def score(layer: int, kv_head: int) -> np.ndarray:
        keys = trial.keys[layer, kv_head]
        units = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        mean = units.mean(0)
        return -(units @ mean) / np.linalg.norm(mean)

    return score


@pytest.mark.parametrize("tokens", [0, 40])
def test_another_score_is_cut_and_a_budget_is_a_bound(tokens: int) -> None:
    trial = Trial("scorecut:keydiff", N, 5, cut=0.0, tokens=tokens)
    params = trial.session.method.params
    assert params.window == 0
    total = tokens * SHAPE.layers * SHAPE.kv_heads if tokens else None
    assert kept(trial) == expected(trial, norms(trial), N, 0.0, 0, total)


def test_a_cut_below_every_score_keeps_every_token() -> None:
    trial = Trial("scorecut", N, 5, window=WINDOW, cut=-99.0)
    assert all(positions == list(range(N)) for positions in kept(trial).values())


def test_a_raw_score_is_cut_as_it_is() -> None:
    trial = Trial("scorecut:keydiff", N, 5, cut=0.1, scale="score")
    score = norms(trial)
    for (layer, head), positions in kept(trial).items():
        assert positions == np.flatnonzero(score(layer, head) >= 0.1).tolist()


@pytest.mark.parametrize("name", ["scorecut:adakv", "scorecut:scorecut", "scorecut:quest"])
def test_what_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(NoComposition) as caught:
        methods.get(name)
    assert caught.value.code == SENSELESS
