"""SentenceKV against its rules written out in float64, and the cold tier that holds part of its spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methodtrial import SHAPE, Seen, Trial

from kvlens.budget import BudgetInfeasible
from kvlens.methods import make_parameters
from kvlens.methods.sentencekv.method import SentenceKV

N, NEW, SINKS, WINDOW, ROOM, FACTOR, SHORT, LONG = 93, 40, 3, 6, 11, 1.5, 2, 12
SET = {"sinks": SINKS, "window": WINDOW, "shortest": SHORT, "longest": LONG, "kernel": 3, "factor": FACTOR}
SET["tokens"] = SINKS + WINDOW + ROOM
TEXT = tuple("." if i % 7 == 3 or i % 11 == 5 else "a" for i in range(N + NEW))


def sentences(upto: int) -> list[tuple[int, int]]:
    found, at = [], SINKS
    for end in range(SINKS + 1, upto + 1):
        if (TEXT[end - 1] == "." and end - at >= SHORT) or end - at >= LONG:
            found.append((at, end))
            at = end
    return found


def kept(trial: Trial, layer: int, head: int, end: int) -> tuple[list[int], np.ndarray]:
    """SnapKV's choice for one KV head among [SINKS, end)."""
    mine = range(head * SHAPE.group, (head + 1) * SHAPE.group)
    sums = np.array([trial.weights(layer, h)[-WINDOW:, : N - WINDOW].sum(0) for h in mine])
    wide = np.pad(sums, ((0, 0), (1, 1)), constant_values=-np.inf)
    score = np.max([wide[:, :-2], wide[:, 1:-1], wide[:, 2:]], 0).mean(0)[SINKS:end]
    count = int(FACTOR * (SINKS + WINDOW + ROOM)) - SINKS - WINDOW
    return sorted((np.argsort(-score, kind="stable")[:count] + SINKS).tolist()), score


def test_kept_tokens_of_the_sentences_nearest_the_mean_query_are_brought() -> None:
    trial = Trial("sentencekv", N, NEW, text=TEXT[:N], **SET)

    seen = Seen(trial.session).decided
    memory = trial.session.memory
    keys = trial.keys
    past = [s for s in sentences(N) if s[1] <= N - WINDOW]
    chosen = [kept(trial, 1, h, past[-1][1])[0] for h in range(SHAPE.kv_heads)]
    for at, (a, b) in enumerate(past):
        held = [sum(a <= p < b for p in mine) for mine in chosen]
        assert (memory.host.cold.size[1, :, at + 2] == np.array(held) * SHAPE.head_token_bytes).all(), (
            "what is gone is gone"
        )
    cuts = {(c.layer, c.kv_head): c for c in memory.log.take_cuts()}
    assert cuts[1, 0].dropped.sum() == past[-1][1] - SINKS - len(chosen[0])
    gone = {(e.layer, e.kv_head, e.span) for e in memory.log.take_events() if e.kind == "evict"}
    assert (1, 0) in {(layer, head) for layer, head, _ in gone}
    asked: list[np.ndarray] = []
    before = N - sentences(N)[-1][1]
    asked = list(trial.queries[1, :, N - before :].swapaxes(0, 1)) if before else []
    for step in range(NEW):
        q, k = trial.step(step)
        trial.end = type(trial.end)(step, N + step, 0.0, 0.0, text=TEXT[N + step])  # type: ignore[union-attr, misc]
        now = N + step
        keys = np.concatenate([keys, k[:, :, None]], 2)
        left = [s for s in sentences(now) if s[1] <= now - WINDOW]
        asked.append(q[1])
        mean = np.mean(asked, 0).reshape(SHAPE.kv_heads, SHAPE.group, -1)
        bias, selection = seen[1]
        for h in range(SHAPE.kv_heads):
            there = set(chosen[h]) | set(range(past[-1][1], left[-1][1]))
            tokens = [[p for p in range(a, b) if p in there] for a, b in left]
            rank = np.array([mean[h] @ keys[1, h, mine].mean(0) if mine else np.zeros(SHAPE.group) for mine in tokens])
            rank = rank.mean(1)
            order = [p for at in np.argsort(-rank, kind="stable") for p in tokens[at]][:ROOM]
            assert [p for p in selection.rows[h].tolist() if p >= 0] == order, (step, h)
            told = np.where([len(mine) > 0 for mine in tokens], rank, np.nan)
            np.testing.assert_allclose(selection.score[h, 2 : 2 + len(rank)], told, atol=1e-4)
            for g in range(SHAPE.group):
                expected = [*range(SINKS), *sorted(order), *range(left[-1][1], now + 1)]
                assert trial.attended(1, h * SHAPE.group + g, bias) == expected, (step, h)
        if sentences(now + 1)[-1][1] == now + 1:
            asked = []
    assert left[-1][1] > N, "decoded sentences left the window"


@pytest.mark.parametrize("bad", [{"tokens": 40}, {"shortest": 9, "longest": 8}, {"kernel": 4}, {"window": 0}])
def test_bad_parameters_are_one_sentence(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^sentencekv: [^\n]*\.$"):
        make_parameters(SentenceKV, None, bad)


def test_a_short_prompt_is_refused_below_its_floor_too() -> None:
    """All of it lies within the window, so that nothing can leave the device."""
    full = SHAPE.full_kv_bytes(24)
    with pytest.raises(BudgetInfeasible) as refused:
        Trial("sentencekv", 20, 4, budget=full // 2)
    least = refused.value.smallest
    assert full // 2 < least
    Trial("sentencekv", 20, 4, budget=least)
    with pytest.raises(BudgetInfeasible):
        Trial("sentencekv", 20, 4, budget=least - 1)
