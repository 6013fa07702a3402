"""LagKV, CurDKV, Compactor, Keyformer, R-KV and random attention against plain float64 formulas: which tokens stay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from test_prompt_eviction import best

from kvlens.methods import rkv
from kvlens.methods.keyformer import Keyformer
from kvlens.methods.run_inputs import Prefilled

N, NEW = 203, 40
HEADS = [(layer, kv_head) for layer in range(SHAPE.layers) for kv_head in range(SHAPE.kv_heads)]


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def lag_scores(states: np.ndarray, sinks: int, lag: int) -> list[np.ndarray]:
    """LagKV's score of each partition that has a next one: states [n, D]."""
    count = (len(states) - sinks) // lag
    parts = [states[sinks + i * lag : sinks + (i + 1) * lag] for i in range(count)]
    scores = []
    for part, following in pairwise(parts):
        low, high = following.min(0), following.max(0)
        scores.append(softmax(((part - low) / (high - low)).std(-1, ddof=1)))
    return scores


@pytest.mark.parametrize(("sinks", "lag"), [(4, 16), (0, 23)])
def test_lagkv_keeps_what_differs_from_the_next_partition(sinks: int, lag: int) -> None:
    each = 6
    ranked = (N - sinks) // lag - 1
    tokens = N - ranked * (lag - each)
    trial = Trial("lagkv", N, 5, sinks=sinks, lag=lag, tokens=tokens)
    for layer, head in HEADS:
        keys, values = (lag_scores(x[layer, head], sinks, lag) for x in (trial.keys, trial.values))
        expected = list(range(sinks))
        for number, (a, b) in enumerate(zip(keys, values, strict=True)):
            expected += [sinks + number * lag + place for place in best((a + b) / 2, each)]
        expected += range(sinks + ranked * lag, N)
        assert trial.lies(layer, head) == expected


def test_lagkv_of_a_short_prompt_keeps_sinks_and_the_newest() -> None:
    trial = Trial("lagkv", 40, 5, sinks=4, lag=19, tokens=42)
    assert trial.lies(0, 0) == list(range(40))
    short = Trial("lagkv", 60, 5, sinks=4, lag=20, tokens=44)
    assert len(short.lies(1, 1)) == 44
    assert short.lies(1, 1)[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize(("leverage", "stretch"), [("product", 16), ("mean", 0), ("key", 7)])
def test_curdkv_keeps_long_keys_and_values(leverage: str, stretch: int) -> None:
    trial = Trial("curdkv", N, 5, leverage=leverage, stretch=stretch, tokens=37)

    def shares(states: np.ndarray) -> np.ndarray:
        squares = (states**2).sum(-1)
        size = stretch or len(squares)
        return np.concatenate([part / part.sum() for part in np.split(squares, range(size, N, size))])

    for layer, head in HEADS:
        k, v = shares(trial.keys[layer, head]), shares(trial.values[layer, head])
        score = {"product": k * v, "mean": (k + v) / 2, "key": k}[leverage]
        score[:4] = np.inf
        assert trial.lies(layer, head) == best(score, 37)


class Unturned:
    """A rotary embedding that turns nothing."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        return keys


@pytest.mark.parametrize(("blend", "scaled"), [(0.5, False), (0.0, True), (2.0, True)])
def test_compactor_adds_leverage_and_non_causal_attention(blend: float, scaled: bool) -> None:
    sinks, window, chunk, tokens = 8, 4, 41, 40
    settings = {"blend": blend, "scaled": scaled, "chunk": chunk, "sketch": 0, "tokens": tokens}
    trial = Trial("compactor", N, 5, rotate=Unturned(), **settings)
    before = N - window
    for layer in range(SHAPE.layers):
        leverages, attention = [], []
        for head in range(SHAPE.kv_heads):
            keys = trial.keys[layer, head, sinks:before]
            centred = keys - keys.mean(0)
            leverages.append(np.diag(centred @ np.linalg.inv(centred.T @ centred + 0.01 * np.eye(24)) @ centred.T))
            received = np.zeros(len(keys))
            for query_head in range(head * SHAPE.group, (head + 1) * SHAPE.group):
                queries = trial.queries[layer, query_head, sinks:before]
                for start in range(0, len(keys), chunk):
                    part = slice(start, start + chunk)
                    logits = queries[part] @ keys[part].T / (24**0.5 if scaled else 1)
                    received[part] += softmax(logits).sum(0) / SHAPE.group
            weighed = np.pad(received * np.linalg.norm(trial.values[layer, head, sinks:before], axis=-1), 1)
            attention.append((weighed[:-2] + weighed[1:-1] + weighed[2:]) / 3)
        z = [(np.array(x) - np.mean(x)) / np.std(x, ddof=1) for x in (leverages, attention)]
        for head in range(SHAPE.kv_heads):
            expected = [sinks + place for place in best(blend * z[0][head] + z[1][head], tokens - sinks - window)]
            assert trial.lies(layer, head) == [*range(sinks), *expected, *range(before, N)]


def test_compactors_sketch_keeps_the_order_of_leverages_roughly() -> None:
    """24 directions of 24 lose nothing; the draw follows the seed."""
    exact, again, drawn = (
        Trial("compactor", N, 5, rotate=Unturned(), blend=1000.0, sketch=sketch, tokens=60) for sketch in (0, 240, 8)
    )
    same = [len(set(exact.lies(*head)) & set(again.lies(*head))) for head in HEADS]
    rough = [len(set(exact.lies(*head)) & set(drawn.lies(*head))) for head in HEADS]
    assert min(same) >= 58
    assert max(rough) < 60


class Sums:
    """Keyformer without noise for one KV head: softmax(logit / tau) added up by position."""

    def __init__(self, trial: Trial, layer: int, head: int, places: int, recent: int, first: float) -> None:
        sums = np.zeros(N)
        for query_head in range(head * SHAPE.group, (head + 1) * SHAPE.group):
            logits = trial.queries[layer, query_head] @ trial.keys[layer, head].T / SHAPE.head_dim**0.5 / first
            logits[np.triu_indices(N, 1)] = -np.inf
            sums += softmax(logits).sum(0)
        newest = list(range(N - recent + 1, N))
        heavy = sorted(range(N - recent + 1), key=lambda p: (-sums[p], p))[: places - 1 - len(newest)]
        self.places, self.recent = places, recent
        self.sums = {p: sums[p] for p in sorted(heavy) + newest}
        self.keys = {p: trial.keys[layer, head, p] for p in self.sums}

    def step(self, position: int, q: np.ndarray, k: np.ndarray, tau: float) -> None:
        if len(self.sums) == self.places:
            able = [p for p in self.sums if p <= position - self.recent]
            victim = min(able, key=lambda p: self.sums[p])
            del self.sums[victim], self.keys[victim]
        self.sums[position], self.keys[position] = 0.0, k
        order = sorted(self.keys)
        logits = q @ np.array([self.keys[p] for p in order]).T / SHAPE.head_dim**0.5
        for p, received in zip(order, softmax(logits / tau).sum(0), strict=True):
            self.sums[p] += received


@pytest.mark.parametrize(("settings", "recent"), [({"recent": 13}, 13), ({}, 8), ({"recent_share": 0.6}, 17)])
def test_keyformer_without_noise_evicts_the_smallest_sum_under_a_rising_temperature(
    settings: dict[str, Any], recent: int
) -> None:
    """Without `recent` three of ten places are for the newest tokens."""
    places = 29
    trial = Trial(
        "keyformer", N, NEW, tokens=places, noise=False, start_temperature=1.0, end_temperature=3.0, **settings
    )
    expected = {place: Sums(trial, *place, places, recent, 1.0) for place in HEADS}
    for step in range(NEW):
        q, k = trial.step(step)
        for (layer, head), sums in expected.items():
            heads = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
            sums.step(N + step, q[layer, heads], k[layer, head], 1.0 + 2.0 * step / NEW)
            assert trial.lies(layer, head) == sorted(sums.sums), (step, layer, head)


def test_keyformer_reads_the_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    worth = Keyformer.worth

    def counted(method: Keyformer, prompt: Prefilled, layer: int) -> torch.Tensor:
        read.append(layer)
        return worth(method, prompt, layer)

    monkeypatch.setattr(Keyformer, "worth", counted)
    Trial("keyformer", N, NEW, tokens=29)
    assert read == list(range(SHAPE.layers))


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rkv_compares_keys_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    keys = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    whole = rkv.redundancy(keys, 0.3)
    sizes: list[int] = []
    where = torch.where

    def noted(mask: torch.Tensor, *others: Any) -> Any:
        sizes.append(mask.shape[1])
        return where(mask, *others)

    monkeypatch.setattr(rkv, "ROWS", rows)
    monkeypatch.setattr(torch, "where", noted)
    assert torch.allclose(rkv.redundancy(keys, 0.3), whole, atol=1e-6)
    assert max(sizes) == min(rows, 50)


def test_keyformers_noise_is_gumbel_and_follows_the_seed() -> None:
    trial, again = (Trial("keyformer", N, NEW, tokens=29, recent=13) for _ in range(2))
    quiet = Trial("keyformer", N, NEW, tokens=29, recent=13, noise=False)
    assert [trial.lies(*head) for head in HEADS] == [again.lies(*head) for head in HEADS]
    assert [trial.lies(*head) for head in HEADS] != [quiet.lies(*head) for head in HEADS]
    drawn = trial.session.method._noisy(torch.zeros(200_000), (0, 0))  # type: ignore[attr-defined]
    assert float(drawn.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(drawn.var()) == pytest.approx(np.pi**2 / 6, rel=0.02)


def rkv_scores(queries: np.ndarray, keys: np.ndarray, recent: int, kernel: int, weight: float) -> np.ndarray:
    """R-KV's score of the tokens before the newest: queries [G, w, D], keys [m, D] by position."""
    logits = (queries @ keys[:-recent].T / SHAPE.head_dim**0.5).max(0)
    seen, half = softmax(logits).mean(0), kernel // 2
    pooled = np.array([seen[max(0, i - half) : i + half + 1].max() for i in range(len(seen))])
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0.0)
    for row in cosine:
        alike = np.nonzero(row > 0.3)[0]
        if len(alike):
            row[alike[-1]] = 0.0
    return weight * pooled - (1 - weight) * softmax(cosine.mean(0))[:-recent]


def test_rkv_gives_up_what_is_attended_little_and_resembles_others() -> None:
    """Twelve places of recent tokens, a ranking every five steps, which names the tokens that go until the next."""
    places, recent, buffer, kernel, weight = 40, 6, 5, 3, 0.4
    settings = {"recent": recent, "buffer": buffer, "kernel": kernel, "weight": weight, "alike": 0.3}
    trial = Trial("rkv", N, NEW, tokens=places, **settings)
    held: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    for layer, head in HEADS:
        heads = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
        newest = trial.queries[layer, heads, -recent:]
        score = rkv_scores(newest, trial.keys[layer, head], recent, kernel, weight)
        score = np.append(score, [np.inf] * recent)
        score[N - recent + 1 :] = np.inf
        held[layer, head] = {p: trial.keys[layer, head, p] for p in best(score, places - 1)}
        assert trial.lies(layer, head) == sorted(held[layer, head])
    queries = {(x, h): list(trial.queries[x, :, -recent:].swapaxes(0, 1)) for x, h in HEADS}
    going: dict[tuple[int, int], list[int]] = {place: [] for place in HEADS}
    ranked = 0
    for step in range(NEW):
        full = step > 0
        if full and ranked % buffer == 0:
            for layer, head in HEADS:
                kept, heads = held[layer, head], slice(head * SHAPE.group, (head + 1) * SHAPE.group)
                order = sorted(kept)
                newest = np.stack(queries[layer, head][-recent:], 1)[heads]
                score = rkv_scores(newest, np.array([kept[p] for p in order]), recent, kernel, weight)
                going[layer, head] = [order[i] for i in np.argsort(score, kind="stable")]
        q, k = trial.step(step)
        for layer, head in HEADS:
            kept = held[layer, head]
            if full:
                del kept[going[layer, head].pop(0)]
            kept[N + step] = k[layer, head]
            queries[layer, head].append(q[layer])
            assert trial.lies(layer, head) == sorted(kept), (step, layer, head)
        ranked += full


@pytest.mark.parametrize("n", [20, 200], ids=["the prompt fits", "the prompt is cut"])
def test_random_attention_draws_at_every_step_among_all_that_are_not_protected(n: int) -> None:
    """A token's turn depends neither on its age nor on its origin, but for a prompt that fits."""
    places, new, sinks, recent = 60, 300, 4, 8
    trial = Trial("random_decode", n, new, tokens=places, sinks=sinks, recent=recent)
    places_of_gone, before = [], [set(trial.lies(*head)) for head in HEADS]
    assert len(before[0]) == min(n, places - 1)
    for step in range(new):
        trial.step(step)
        for index, head in enumerate(HEADS):
            held = set(trial.lies(*head))
            gone = before[index] - held
            if gone:
                newest = n + step - recent
                free = sorted(p for p in before[index] if sinks <= p <= newest and (n == 200 or p >= n))
                assert gone <= set(free)
                if len(free) > 10:
                    places_of_gone.append(free.index(*gone) / (len(free) - 1))
            before[index] = held
    assert len(places_of_gone) > 500
    quarters = np.histogram(places_of_gone, 4, (0, 1))[0] / len(places_of_gone)
    np.testing.assert_allclose(quarters, 0.25, atol=0.08)


def test_random_attention_gives_up_decoded_tokens_by_chance_and_the_prompt_last() -> None:
    places, n, new = 80, 40, 400
    trials = [
        Trial("random_decode", n, new, tokens=places, sinks=4, recent=8, keep_prompt=kept) for kept in (True, False)
    ]
    for trial in trials:
        for step in range(new):
            trial.step(step)
    kept, free = ([trial.lies(*head) for head in HEADS] for trial in trials)
    newest = range(n + new - 8, n + new)
    for positions in kept:
        assert positions[:n] == list(range(n)), "the prompt stays while a decoded token can go"
    for positions in free:
        assert positions[:4] == [0, 1, 2, 3]
        assert set(positions[4:]) & set(range(n)) != set(range(4, n))
    for positions in (*kept, *free):
        assert set(newest) <= set(positions)
        assert len(positions) == places
    assert len({tuple(positions) for positions in kept}) == len(kept), "every KV head draws for itself"


def test_simlayerkv_keeps_all_of_the_least_lazy_layer() -> None:
    """Of two layers the budget holds one and 20 tokens more, which are the newest of the lazier one."""
    sinks, window, least = 4, 16, 20
    whole = N + 1
    trial = Trial("simlayerkv", N, 5, sinks=sinks, window=window, tokens=(whole + least + 20) // 2)
    laziness = []
    for layer in range(SHAPE.layers):
        shares = []
        for head in range(SHAPE.q_heads):
            kv_head = head // SHAPE.group
            keys = np.concatenate([trial.keys[layer, kv_head], trial.last_k[layer, kv_head]])
            paid = softmax(trial.last_q[layer, head, 0] @ keys.T / SHAPE.head_dim**0.5)
            shares.append(paid[:sinks].sum() + paid[-window:].sum())
        laziness.append(np.mean(shares))
    lazy = int(np.argmax(laziness))
    for head in range(SHAPE.kv_heads):
        assert trial.lies(1 - lazy, head) == list(range(N))
        count = (whole + least + 20) // 2 * 2 - whole
        assert trial.lies(lazy, head) == [*range(sinks), *range(whole - (count - sinks), N)]
