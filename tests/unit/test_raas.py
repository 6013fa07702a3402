"""RaaS against pages in plain dictionaries, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from methodtrial import SHAPE, Trial

PAGE, N, NEW, ALPHA = 5, 63, 45, 0.12
FIRST = N % PAGE


def shares(q: np.ndarray, pages: list[np.ndarray]) -> np.ndarray:
    """q [G, D], keys of each page -> estimated share of attention of each, mean over the group."""
    low, high = (np.array([extreme(page, axis=0) for page in pages]) for extreme in (np.min, np.max))
    scores = np.maximum(q[:, None] * low, q[:, None] * high).sum(-1) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).mean(0)


class Pages:
    """One KV head: first tokens, and pages by their start with keys and timestamp."""

    def __init__(self, q: np.ndarray, keys: np.ndarray, room: int, keep: bool) -> None:
        self.room, self.keep = room, keep
        paged = {start: list(keys[start : start + PAGE]) for start in range(FIRST, N, PAGE)}
        share = dict(zip(paged, shares(q, [np.array(page) for page in paged.values()]), strict=True))
        share[N - PAGE] = np.inf  # the newest page stays
        chosen = sorted(sorted(paged, key=lambda start: -share[start])[: room - 1])
        self.keys = {start: paged[start] for start in chosen}
        self.stamp = dict.fromkeys(chosen, -1)
        self.going: list[int] = []
        self.ages: list[int] = []

    def step(self, step: int, q: np.ndarray, k: np.ndarray) -> None:
        position = N + step
        if step % PAGE == 0:
            if len(self.keys) == self.room:
                able = [s for s in self.keys if s < position - PAGE and not (self.keep and s < N)]
                oldest = min(able, key=lambda s: (self.stamp[s], s))
                self.ages.append(step - 1 - self.stamp[oldest])
                self.going = list(range(oldest, oldest + PAGE))
                del self.keys[oldest], self.stamp[oldest]
            self.keys[position], self.stamp[position] = [], step
        self.going = self.going[1:]
        self.keys[position - step % PAGE].append(k)
        order = sorted(self.keys)
        for start, share in zip(order, shares(q, [np.array(self.keys[s]) for s in order]), strict=True):
            if share > ALPHA:
                self.stamp[start] = step

    def lies(self) -> list[int]:
        inside = [s + at for s, page in self.keys.items() for at in range(len(page))]
        return sorted([*range(FIRST), *self.going, *inside])


@pytest.mark.parametrize("keep", [True, False])
def test_the_page_wanted_longest_ago_goes(keep: bool) -> None:
    pages = 16 if keep else 6
    trial = Trial("raas", N, NEW, page=PAGE, alpha=ALPHA, recent=PAGE, keep_prompt=keep, tokens=FIRST + pages * PAGE)
    heads = [(layer, head) for layer in range(SHAPE.layers) for head in range(SHAPE.kv_heads)]
    groups = {at: slice(at[1] * SHAPE.group, (at[1] + 1) * SHAPE.group) for at in heads}
    expected = {
        (layer, head): Pages(trial.queries[layer, groups[layer, head], -1], trial.keys[layer, head], pages, keep)
        for layer, head in heads
    }
    stamps, notes = set(), []
    for step in range(NEW):
        q, k = trial.step(step)
        notes += trial.session.method.drain_journal()
        for (layer, head), mine in expected.items():
            mine.step(step, q[layer, groups[layer, head]], k[layer, head])
            assert trial.lies(layer, head) == mine.lies(), (step, layer, head)
            stamps |= set(mine.stamp.values())
    assert len(stamps) > 8, "pages are wanted again at many steps"
    for (layer, head), mine in expected.items():
        told = [int(note.values[head]) for note in notes if note.layer == layer]
        assert told == mine.ages
    rows = [row for row in trial.session.memory.log.take_cuts() if row.step >= 0]
    assert rows
    assert all(row.cut >= row.score[0] >= -1 for row in rows)


def test_a_page_gives_its_places_up_one_by_one_and_the_prompt_stays() -> None:
    trial = Trial("raas", N, NEW, page=PAGE, recent=PAGE, tokens=FIRST + 15 * PAGE)
    for step in range(NEW):
        trial.step(step)
        assert len(trial.lies(1, 1)) == min(N + step + 1, FIRST + 15 * PAGE)
        assert set(trial.lies(0, 0)) >= set(range(N))


def test_a_budget_is_used_in_whole_pages() -> None:
    full = SHAPE.full_kv_bytes(N + 1 + NEW)
    trial = Trial("raas", N, NEW, budget=full // 2, page=PAGE, keep_prompt=False)
    for step in range(NEW):
        trial.step(step)
    memory = trial.session.memory
    one_more = SHAPE.layers * SHAPE.kv_heads * (PAGE * (SHAPE.head_token_bytes + 9 + 8) + 2 * SHAPE.head_dim * 4 + 4)
    assert full // 2 - one_more < memory.account.peak <= full // 2
