"""CHESS against the paper: a case worked out by hand, an independent float64 reference over many steps, and what must
always hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import chess_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ListSink, raises_code, run, task_prompt

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.engine.session import Session
from kvlens.methods.chess.method import Chess
from kvlens.methods.chess.params import ChessParameters, Sizes, pages_within
from kvlens.methods.chess.tree import Tree, page_vectors
from kvlens.methods.run_inputs import RunContext, StepEnd
from kvlens.shape import KVShape
from kvlens.tiers.slots import ROLE

SHAPE = KVShape(layers=2, q_heads=4, kv_heads=2, head_dim=8, itemsize=4)
PARAMS = ChessParameters(
    page=4,
    chunk_pages=2,
    grid_chunks=3,
    window_pages=2,
    grid_ratio=0.6,
    chunk_ratio=0.6,
    page_ratio=0.6,
    candidates="older",
    trigger="never",
)


class Trial:
    """A session driven by hand, one random token at a time, with its own record of all keys and values."""

    def __init__(
        self,
        params: ChessParameters,
        n: int,
        shape: KVShape = SHAPE,
        max_new: int = 40,
        seed: int = 0,
        budget: int | None = None,
    ):
        self.rng, self.shape, self.n = np.random.default_rng(seed), shape, n
        full = shape.full_kv_bytes(n + max_new)
        context = RunContext(shape, n, max_new, budget, full, seed, "tiny", torch.float32, torch.device("cpu"))
        self.session = Session(Chess, params, context)
        self.keys, self.values = (
            self._tokens(n),
            self.rng.standard_normal((shape.layers, shape.kv_heads, n, shape.head_dim)),
        )
        self.steps = 0

    def _tokens(self, n: int) -> np.ndarray:
        """Keys that change their direction every nine tokens, so that pages differ."""
        shape = (self.shape.layers, self.shape.kv_heads, n // 9 + 1, self.shape.head_dim)
        regions = np.repeat(self.rng.standard_normal(shape), 9, axis=2)[:, :, :n]
        return regions + 0.3 * self.rng.standard_normal((*shape[:2], n, shape[3]))

    def prefill(self) -> Trial:
        queries = torch.zeros(1, self.shape.q_heads, self.n, self.shape.head_dim)
        for layer in range(self.shape.layers):
            self.session.write(layer, tensor(self.keys[layer]), tensor(self.values[layer]))
            self.session.attend(layer, queries, self.shape.head_dim**-0.5)
        self.session.finish_prefill(torch.zeros(self.n))
        return self

    def step(
        self, previous: StepEnd | None = None, k: np.ndarray | None = None, q: np.ndarray | None = None
    ) -> torch.Tensor:
        """One decode step -> outputs [L, H, D]."""
        shape, rng = self.shape, self.rng
        self.session.begin_step(self.steps, previous)
        k = rng.standard_normal((shape.layers, shape.kv_heads, shape.head_dim)) if k is None else k
        v = rng.standard_normal(k.shape)
        self.q = rng.standard_normal((shape.layers, shape.q_heads, shape.head_dim)) * 1.5 if q is None else q
        self.keys, self.values = (np.concatenate([a, b[:, :, None]], 2) for a, b in ((self.keys, k), (self.values, v)))
        out = []
        for layer in range(shape.layers):
            self.session.write(layer, tensor(k[layer])[:, None], tensor(v[layer])[:, None])
            out.append(self.session.attend(layer, tensor(self.q[layer])[None, :, None], shape.head_dim**-0.5)[0, :, 0])
        self.steps += 1
        return torch.stack(out)

    def ended(self, entropy: float = 0.0, varentropy: float = 0.0) -> StepEnd:
        """The step that `step` carried out last."""
        return StepEnd(self.steps - 1, self.n + self.steps - 1, 0.0, entropy, varentropy)

    def attended(self, layer: int, kv_head: int = 0, query_head: int = 0) -> list[int]:
        """Positions with a finite bias."""
        memory = self.session.memory
        slots = memory.hot.slots(layer)
        bias = memory.reads.bias(layer, self.session.method.select(layer, tensor(self.q[layer])))[0]
        live = slots.role[kv_head] < len(ROLE)
        read = live if bias is None else live & torch.isfinite(bias[kv_head, query_head])
        return sorted(slots.position[kv_head][read].tolist())

    def journal(self) -> dict[str, list[float]]:
        return {note.name: note.values.float().tolist() for note in self.session.method.drain_journal()}


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def pages(*numbers: int) -> list[int]:
    """Positions of pages of two tokens."""
    return [2 * j + t for j in numbers for t in (0, 1)]


HAND = ChessParameters(
    page=2,
    chunk_pages=2,
    grid_chunks=2,
    window_pages=1,
    grid_ratio=0.5,
    chunk_ratio=0.5,
    page_ratio=0.5,
    candidates="older",
    threshold_entropy=1.5,
    threshold_varentropy=0.5,
)


def by_hand(**changes: Any) -> Trial:
    """One layer, one head, D = 2, eight pages of two tokens in four chunks in two grids. Page 0 is the sink, page 7 the
    window, so the anchor is (1, 0) and a score is the first coordinate. Keys of pages 1..6: (1,0) (0,1) (0,3) (2,0)
    (4,0) (1,1).

    Chunks of the pages before the window: {1}, {2,3}, {4,5}, {6}, centroids (1,0) (0,2) (3,0) (1,1), scores 1 0 3 1.
    Grids: {(1,0), (0,2)} = (.5, 1), {(3,0), (1,1)} = (2, .5), scores .5 and 2.
    """
    trial = Trial(dataclasses.replace(HAND, **changes), 16, KVShape(1, 1, 1, 2, 4))
    rows = [(5, 5), (1, 0), (0, 1), (0, 3), (2, 0), (4, 0), (1, 1), (1, 0)]
    trial.keys = np.repeat(np.array(rows, float), 2, axis=0)[None, None]
    return trial.prefill()


def test_first_selection_by_hand() -> None:
    """Half of two grids: the second. Half of its two chunks: {4, 5}. Half of its two pages: page 5. Attended: 0, 5, 7,
    the new token."""
    trial = by_hand()
    noted = trial.journal()
    assert noted["grid_score"] == [0.5, 2.0]
    assert noted["chunk_score"] == [1.0, 0.0, 3.0, 1.0]
    assert math.isnan(noted["page_score"][0])
    assert noted["page_score"][1:] == [1.0, 0.0, 0.0, 2.0, 4.0, 1.0]
    assert noted["grid_kept"] == [0, 1]
    assert noted["chunk_kept"] == [0, 0, 1, 0]
    assert noted["page_kept"] == [0, 0, 0, 0, 0, 1, 0]
    assert noted["safe_pages"] == [1, 7, 8]
    out = trial.step(q=np.array([[[1.0, 0.0]]]), k=np.array([[[0.0, 0.0]]]))
    assert trial.attended(0) == [*pages(0, 5, 7), 16]
    weights = np.exp(np.array([5, 5, 4, 4, 1, 1, 0]) / math.sqrt(2))
    expected = weights / weights.sum() @ trial.values[0, 0, [*pages(0, 5, 7), 16]]
    np.testing.assert_allclose(out[0, 0].numpy(), expected, atol=1e-6)


def test_algorithm_1_as_printed_keeps_more() -> None:
    """Zeroed scores count: chunk scores 0 0 3 1 have the median 0.5, so both active chunks stay; page scores 0 0 0 2 4
    1 have the median 0.5, so all three pages of these chunks stay."""
    trial = by_hand(quantile="paper_literal")
    noted = trial.journal()
    assert noted["chunk_kept"] == [0, 0, 1, 1]
    assert noted["page_kept"] == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("thresholds", "condition", "why"),
    [
        ((1.5, 0.5), "and", 1),
        ((2.5, 0.5), "and", 0),
        ((1.5, 1.0), "and", 0),
        ((2.5, 0.5), "or", 1),
        ((2.5, 1.0), "or", 0),
    ],
)
def test_backtracking_by_hand(thresholds: tuple[float, float], condition: str, why: int) -> None:
    """Page 8 has entropies 1 and 3 nats: mean 2, variance 1. Its keys (0, 1) make it the anchor of a reconstruction:
    page 7 has left the window, scores of 1..7 are 0 1 3 0 0 1 0; chunks {1} 0, {2,3} 2, {4,5} 0, {6,7} (1, .5) 0.5;
    grids (.5, 1) 1, (2, .25) 0.25; so the first grid, chunk {2, 3}, page 3. Without a reconstruction page 5 stays
    selected and page 7 is no longer attended."""
    trial = by_hand(threshold_entropy=thresholds[0], threshold_varentropy=thresholds[1], condition=condition)
    up = np.array([[[0.0, 1.0]]])
    trial.step(k=up)
    trial.step(trial.ended(1.0, 0.3), k=up)
    trial.journal()
    trial.step(trial.ended(3.0, 0.1), k=up)
    noted = trial.journal()
    assert noted["page_completed"] == [8]
    assert noted["page_entropy_nats"] == [2]
    assert noted["page_varentropy_nats2"] == [1]
    assert noted["reconstructed"] == [why]
    assert trial.attended(0) == [*pages(0, 3 if why else 5, 8), 18]
    if why:
        assert noted["chunk_score"] == [0, 2, 0, 0.5]
        assert noted["grid_score"] == [1, 0.25]
    else:
        assert "page_score" not in noted


def test_a_page_that_prefill_began_is_not_judged() -> None:
    trial = Trial(
        dataclasses.replace(PARAMS, trigger="dynamic", threshold_entropy=0.0, threshold_varentropy=0.0), 30
    ).prefill()
    trial.step()
    trial.journal()
    trial.step(trial.ended(5.0))
    trial.step(trial.ended(1.0))  # position 31 ends page 7, which prefill began
    noted = trial.journal()
    assert noted["page_completed"] == [7]
    assert math.isnan(noted["page_entropy_nats"][0])
    assert noted["reconstructed"] == [0]


CHOICES: dict[str, list[Any]] = {
    "candidates": ["all", "older"],
    "centroids": ["members", "printed"],
    "quantile": ["active", "paper_literal"],
    "scale": ["plain", "layer"],
    "anchor_tail": [True, False],
    "trigger": ["dynamic", "fixed", "every", "never"],
    "interval": [1, 2, 3],
    "condition": ["and", "or"],
    "varentropy": ["page", "token"],
    "max_interval": [0, 3],
    "window_pages": [1, 2, 4],
    "sink_pages": [0, 1, 3],
    "chunk_pages": [1, 2, 3],
    "grid_chunks": [1, 2, 4],
    "grid_ratio": [0.31, 0.57, 1.0],
    "chunk_ratio": [0.23, 0.71, 1.0],
    "page_ratio": [0.19, 0.53, 1.0],
}


@pytest.mark.parametrize("seed", range(40))
def test_selections_and_outputs_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(500 + seed)
    chosen = {name: values[int(rng.integers(len(values)))] for name, values in CHOICES.items()}
    if chosen["quantile"] == "active" and seed % 4 == 0:
        chosen["keep"] = float(rng.choice([0.3, 0.5, 0.8]))
    n = int(rng.integers(3, 110))
    p = ChessParameters(page=4, threshold_entropy=1.0, threshold_varentropy=0.5, **chosen)
    trial = Trial(p, n, seed=seed).prefill()
    s = reference.Settings(
        p.page,
        p.chunk_pages,
        p.grid_chunks,
        p.window_pages,
        p.sink_pages,
        (p.grid_ratio, p.chunk_ratio, p.page_ratio),
        p.candidates == "older",
        p.quantile == "paper_literal",
        p.scale == "layer",
        p.trigger,
        p.interval,
        p.condition == "and",
        p.varentropy == "token",
        p.max_interval,
        (1.0, 0.5),
        p.anchor_tail,
        p.keep,
        p.centroids == "printed",
    )
    expected = reference.Chess(s, n)
    expected.begin(trial.keys)
    check_outcome(trial, expected)
    previous = None
    for _ in range(30):
        out = trial.step(previous)
        noted: dict[str, list[float]] = trial.journal() if previous else {}
        assert noted.get("reconstructed", [0.0])[0] == expected.why
        if "page_completed" in noted:
            np.testing.assert_allclose(
                [noted["page_entropy_nats"][0], noted["page_varentropy_nats2"][0]], expected.judged, rtol=1e-5
            )
        complete = (trial.keys.shape[2] - 1) // p.page
        positions = expected.attended(complete, trial.keys.shape[2])
        for layer in range(SHAPE.layers):
            assert all(trial.attended(layer, head // 2, head % 2) == positions for head in range(4))
            wanted = reference.attention(trial.keys[layer], trial.values[layer], trial.q[layer], positions)
            np.testing.assert_allclose(out[layer].numpy(), wanted, atol=2e-5)
        entropy, varentropy = float(rng.exponential(1.2)), float(rng.exponential(0.7))
        expected.end_step(trial.keys, entropy, varentropy)
        previous = trial.ended(entropy, varentropy)


def check_outcome(trial: Trial, expected: reference.Chess) -> None:
    """Scores and kept units of the first selection, as noted."""
    noted = trial.journal()
    if expected.outcome is None:
        assert "page_score" not in noted
        return
    kept = {"grid": expected.outcome.grids, "chunk": expected.outcome.chunks, "page": expected.outcome.pages}
    for level, units in kept.items():
        assert {i for i, value in enumerate(noted[f"{level}_kept"]) if value} == units
        scores = {i: value for i, value in enumerate(noted[f"{level}_score"]) if not math.isnan(value)}
        assert scores == pytest.approx(expected.outcome.scores[level], rel=1e-4, abs=1e-4)


def test_nothing_is_copied_or_moved() -> None:
    trial = Trial(dataclasses.replace(PARAMS, trigger="every"), 50).prefill()
    trial.step()
    slots = trial.session.memory.hot.slots(0)
    before, storage = slots.keys[:, :50].clone(), slots.keys.data_ptr()
    for _ in range(30):
        trial.step(trial.ended())
    slots = trial.session.memory.hot.slots(0)
    assert slots.keys.data_ptr() == storage
    assert torch.equal(slots.keys[:, :50], before)
    assert trial.session.memory.transfers.total == {"h2d": 0, "d2h": 0}
    assert [row.tok_start for row in trial.session.memory.spans.rows[1:]] == [
        4 * j for j in range(len(trial.session.memory.spans.rows) - 1)
    ]


@pytest.mark.parametrize("changes", [{}, {"candidates": "all"}, {"chunk_pages": 8}, {"window_pages": 30}], ids=str)
def test_resident_bytes_are_exactly_the_floor(changes: dict[str, Any]) -> None:
    params = dataclasses.replace(PARAMS, trigger="every", **changes)
    floor = Chess.floor_bytes(params, SHAPE, 61, 40)
    with pytest.raises(BudgetInfeasible):
        Trial(params, 61, budget=floor - 1).prefill()
    trial = Trial(params, 61, budget=floor).prefill()
    assert trial.session.memory.account.resident == floor
    for step in range(40):
        trial.step(trial.ended() if step else None)
        assert trial.session.memory.account.peak == floor
    assert floor > SHAPE.full_kv_bytes(101)


def test_with_all_ratios_one_it_is_full_attention_bit_for_bit(demo: Any) -> None:
    prompt, _ = task_prompt(demo, "needle", 512, max_new=30)
    full = run(demo, prompt, "full", max_new=30, keep_logits=True, ignore_eos=True)
    ones = {"grid_ratio": 1.0, "chunk_ratio": 1.0, "page_ratio": 1.0, "trigger": "every"}
    same = run(demo, prompt, "chess", preset="demo", overrides=ones, max_new=30, keep_logits=True, ignore_eos=True)
    assert same.ids == full.ids
    assert all(torch.equal(a, b) for a, b in zip(full.logits, same.logits, strict=True))
    less = run(demo, prompt, "chess", preset="demo", overrides=ones | {"page_ratio": 0.5}, max_new=2, keep_logits=True)
    assert not torch.equal(full.logits[0], less.logits[0])


def test_unrotated_keys_are_the_ones_before_the_turn() -> None:
    """A stand-in for RoPE that doubles the keys at odd positions."""
    torch.manual_seed(0)

    def rotate(keys, positions, layer=None, back=False):
        return keys * (positions % 2 + 1.0)[:, None] ** (-1.0 if back else 1.0)

    context = RunContext(SHAPE, 40, 8, None, 1, 0, "tiny", torch.float32, torch.device("cpu"), rotate=rotate)
    method = Chess(dataclasses.replace(PARAMS, keys="unrotated"), context)
    plain = torch.randn(2, 2, 8, 8)
    turned = rotate(plain, torch.arange(12, 20))
    torch.testing.assert_close(method._vectors(turned, 12, 4), page_vectors(plain, 4))
    with pytest.raises(ValueError, match="use keys=rotated"):
        Chess(dataclasses.replace(PARAMS, keys="unrotated"), dataclasses.replace(context, rotate=None))


ratio = st.floats(0.01, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.tuples(ratio, ratio, ratio),
    st.integers(0, 2**16),
)
def test_a_kept_unit_lies_under_kept_units_and_counts_are_the_ratios(
    count: int, first: int, chunk_pages: int, grid_chunks: int, ratios: tuple[float, float, float], seed: int
) -> None:
    torch.manual_seed(seed)
    tree = tree_of(torch.randn(count, 6), first, chunk_pages, grid_chunks, count)
    found = tree.select(torch.randn(6), ratios, "active")
    kept = [
        {base + i for i, k in enumerate(level.tolist()) if k}
        for base, level in zip(found.first, found.kept, strict=True)
    ]
    (g0, g1), (c0, c1), (p0, p1) = tree.ranges()
    under_grids = [c for c in range(c0, c1) if c // grid_chunks in kept[0]]
    under_chunks = [j for j in range(p0, p1) if j // chunk_pages in kept[1]]
    for members, units, share in zip((range(g0, g1), under_grids, under_chunks), kept, ratios, strict=True):
        assert units <= set(members)
        assert len(units) == (min(len(members), max(1, math.ceil(share * len(members) - 1e-9))))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**16))
def test_pages_joining_one_by_one_make_the_same_centroids(
    count: int, first: int, chunk_pages: int, grid_chunks: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(count, 6)
    at_once = tree_of(rows, first, chunk_pages, grid_chunks, count)
    in_turn = tree_of(rows, first, chunk_pages, grid_chunks, 0)
    for stop in range(1, count + 1):
        in_turn.join(stop)
    assert in_turn.ranges() == at_once.ranges()
    torch.testing.assert_close(in_turn.vectors, at_once.vectors)


def tree_of(rows: torch.Tensor, first: int, chunk_pages: int, grid_chunks: int, joined: int) -> Tree:
    chunks = -(-len(rows) // chunk_pages)
    tree = Tree(
        -(-chunks // grid_chunks),
        chunks,
        len(rows),
        rows.shape[1],
        chunk_pages,
        grid_chunks,
        first,
        rows.dtype,
        rows.device,
    )
    tree.put(0, rows)
    tree.join(joined)
    return tree


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 1.0, exclude_max=True), st.integers(200, 5000), st.integers(0, 2), st.integers(1, 4))
def test_keep_stays_within_the_share_where_it_can(keep: float, tokens: int, sinks: int, window: int) -> None:
    params = dataclasses.replace(PARAMS, keep=keep, sink_pages=sinks, window_pages=window)
    count = pages_within(params, tokens)
    safe = (sinks + window + 1) * params.page
    assert count == 1 or safe + count * params.page <= keep * tokens + 1e-6
    assert safe + (count + 1) * params.page > keep * tokens - 1e-6


def test_keep_sets_the_share_really_attended(demo: Any) -> None:
    prompt, _ = task_prompt(demo, "needle", 2048, max_new=12)
    for keep in (0.05, 0.1, 0.2):
        sink = ListSink()
        run(demo, prompt, "chess", preset="demo", overrides={"keep": keep}, max_new=12, sink=sink)
        share = max(float(record.kv["attended_tokens"].max()) for record in sink.steps) / len(prompt.ids)
        assert keep - 0.01 < share <= keep


def test_all_tokens_are_attended_where_all_are_to_be(demo: Any) -> None:
    """Also pages that leave the window after the last selection."""
    prompt, _ = task_prompt(demo, "needle", 300, max_new=40)
    sink = ListSink()
    run(demo, prompt, "chess", preset="demo", overrides={"keep": 1.0}, max_new=40, sink=sink, ignore_eos=True)
    assert len(sink.steps) == 40
    for record in sink.steps:
        assert (record.kv["attended_tokens"] == len(prompt.ids) + record.step).all()


def test_bad_parameters_give_one_sentence() -> None:
    for bad in (
        {"page": 0},
        {"window_pages": 0},
        {"sink_pages": -1},
        {"page_ratio": 0.0},
        {"grid_ratio": 1.1},
        {"keep": 1.5},
        {"threshold_entropy": math.nan},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ChessParameters(**bad)
    with raises_code("parameters_disagree"):
        ChessParameters(keep=0.1, quantile="paper_literal")
    with raises_code("not_a_choice", parameter="trigger"):
        methods.make_parameters(Chess, None, {"trigger": "sometimes"})


def test_sizes_need_no_torch_and_grow_with_the_prompt() -> None:
    floors = [Chess.floor_bytes(PARAMS, SHAPE, n, 16) for n in (3, 50, 200, 800)]
    assert floors == sorted(floors)
    assert Sizes.count(ChessParameters(), 128 * 1024, 1).grids == 64
