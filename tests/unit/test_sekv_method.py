"""SeKV on real memory tiers: by hand, against the NumPy reference, at its limits, and within its budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import sekv_reference as reference
import torch
from support import raises_code

from kvlens.budget import BudgetInfeasible
from kvlens.engine.session import Session
from kvlens.kernels.attend import attention_weights
from kvlens.lab.training.sekv.files import save_router
from kvlens.methods.run_inputs import Rotate, RunContext, StepEnd
from kvlens.methods.sekv import layout as sekv_layout
from kvlens.methods.sekv.method import SeKV
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.router import Router
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.tiers.slots import ROLE

SHAPE = KVShape(layers=2, q_heads=4, kv_heads=2, head_dim=8, itemsize=4)
PARAMS = SeKVParameters(window=10, block=8, l_min=4, l_max=12, dim=4, max_rank=3, zoom_rate=0.3, anchor_share=0.1)


class Trial:
    """A session driven by hand, one random token at a time, with its own record of all keys and values."""

    def __init__(
        self,
        params: SeKVParameters,
        n: int,
        shape: KVShape = SHAPE,
        budget: int | None = None,
        max_new: int = 4,
        seed: int = 0,
        rotate: Rotate | None = None,
    ):
        rng = np.random.default_rng(seed)
        self.rng, self.shape, self.n = rng, shape, n
        context = RunContext(
            shape,
            n,
            max_new,
            budget,
            shape.full_kv_bytes(n + max_new),
            seed,
            "tiny",
            torch.float32,
            torch.device("cpu"),
            rotate=rotate,
        )
        self.session = Session(SeKV, params, context)
        # Keys with a few strong directions per region of the prompt, so that heads do prefer some spans to others.
        regions = rng.standard_normal((shape.layers, shape.kv_heads, n // 9 + 1, shape.head_dim)) * 2
        self.keys = np.repeat(regions, 9, axis=2)[:, :, :n] + 0.4 * rng.standard_normal(
            (shape.layers, shape.kv_heads, n, shape.head_dim)
        )
        self.values = rng.standard_normal(self.keys.shape)
        self.queries = rng.standard_normal((shape.layers, shape.q_heads, n, shape.head_dim)) * 1.5
        self.nats = rng.exponential(size=n)
        self.nats[0] = math.nan

    def prefill(self) -> Trial:
        for layer in range(self.shape.layers):
            self.session.write(layer, tensor(self.keys[layer]), tensor(self.values[layer]))
            self.session.attend(layer, tensor(self.queries[layer])[None], self.shape.head_dim**-0.5)
        self.session.finish_prefill(tensor(self.nats))
        return self

    def step(self, step: int, previous: StepEnd | None = None, q: np.ndarray | None = None) -> torch.Tensor:
        """One decode step of random tokens -> outputs [L, H, D]; sets `q`, `k`, `v` to what went in."""
        shape, rng = self.shape, self.rng
        self.session.begin_step(step, previous)
        self.k, self.v = rng.standard_normal((2, shape.layers, shape.kv_heads, shape.head_dim))
        self.q = rng.standard_normal((shape.layers, shape.q_heads, shape.head_dim)) * 1.5 if q is None else q
        out = []
        for layer in range(shape.layers):
            self.session.write(layer, tensor(self.k[layer])[:, None], tensor(self.v[layer])[:, None])
            out.append(self.session.attend(layer, tensor(self.q[layer])[None, :, None], shape.head_dim**-0.5)[0, :, 0])
        return torch.stack(out)

    def masses(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Mass of coarse entries and of span tokens in the recall zone, [H, span id]."""
        memory = self.session.memory
        pool, hot = memory.hot.pool(layer), memory.hot.slots(layer)
        q = tensor(self.q[layer])
        selection = self.session.method.select(layer, q)
        weights = attention_weights(q, hot.keys, memory.reads.bias(layer, selection)[0], self.shape.head_dim**-0.5)
        coarse, fine = np.zeros((2, self.shape.q_heads, memory.spans.capacity))
        group = self.shape.group
        first = pool.start["recall"]
        for head in range(self.shape.q_heads):
            for slot in range(pool.zones.slots):
                span, role = int(hot.span[head // group, slot]), int(hot.role[head // group, slot])
                weight = float(weights[head // group, head % group, slot])
                if role == ROLE["coarse"]:
                    coarse[head, span] += weight
                elif first <= slot < first + pool.zones.recall and weight:
                    fine[head, span] += weight
        return coarse, fine

    def spans(self) -> list[tuple[int, int, str]]:
        return [(r.tok_start, r.tok_end, r.kind) for r in self.session.memory.spans.rows[1:]]


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def full_attention(trial: Trial, layer: int) -> np.ndarray:
    """Exact attention over prompt and decoded token, float64."""
    out = []
    for head in range(trial.shape.q_heads):
        g = head // trial.shape.group
        keys = np.concatenate([trial.keys[layer, g], trial.k[layer, g][None]])
        values = np.concatenate([trial.values[layer, g], trial.v[layer, g][None]])
        p = np.exp(keys @ trial.q[layer, head] / math.sqrt(trial.shape.head_dim))
        out.append(p / p.sum() @ values)
    return np.array(out)


def test_small_case_worked_out_by_hand(tmp_path: Path) -> None:
    """One layer, one head, D = 2. Tokens 0..1 sinks, 6 an anchor (9 nats, the mean is about 1.5, the threshold about
    3.6), 16..19 window: spans 2..5, 7..15. Rows of W are the unit vectors; keys of 2..5 point up, of 7..15 to the
    right.

    q = (3, 0): score of 2..5 = 0 / sqrt 2 + log 4 = 1.386, of 7..15 = 3 / sqrt 2 + log 9 = 4.319. With tau = sigmoid(2)
    the second is expanded and the first is not.
    """
    shape = KVShape(1, 1, 1, 2, 4)
    params = SeKVParameters(
        window=4,
        block=4,
        l_min=3,
        l_max=10,
        dim=2,
        max_rank=1,
        sinks=2,
        router="trained",
        form="factors",
        router_file=str(tmp_path / "r.safetensors"),
    )
    save_router(Router("trained", torch.eye(2)[None, None], torch.tensor([[2.0]])), tmp_path / "r.safetensors")
    trial = Trial(params, 20, shape)
    trial.nats[:] = 1.0
    trial.nats[[0, 6]] = math.nan, 9.0
    trial.keys[0, 0, 2:6] = [0.0, 2.0]
    trial.keys[0, 0, 7:16] = [1.5, 0.0]
    trial.values[0, 0, 7:16] = [[1.0, 1.0]]
    trial.prefill().step(0, q=np.array([[[3.0, 0.0]]]))
    assert trial.spans() == [(0, 2, "sink"), (2, 6, "entropy"), (6, 7, "anchor"), (7, 16, "entropy")]
    selection = trial.session.method.select(0, torch.tensor([[3.0, 0.0]]))
    assert selection is not None
    torch.testing.assert_close(selection.score[0, [2, 4]], torch.tensor([math.log(4), 3 / math.sqrt(2) + math.log(9)]))
    assert selection.fine[0, 0].nonzero().flatten().tolist() == [4]
    assert [s for s in selection.requested[0].tolist() if s >= 0] == [4]
    assert selection.zoomable.nonzero().flatten().tolist() == [2, 4]
    coarse, fine = trial.masses(0)
    exact = [*range(2), 6, *range(16, 20)]
    logits = [trial.keys[0, 0, t] @ [3.0, 0.0] / math.sqrt(2) for t in exact] + [
        trial.k[0, 0] @ [3.0, 0.0] / math.sqrt(2)
    ]
    total = sum(map(math.exp, logits)) + 4 * math.exp(0) + 9 * math.exp(4.5 / math.sqrt(2))
    assert coarse[0, 2] == pytest.approx(4 / total, rel=1e-5)
    assert fine[0, 4] == pytest.approx(9 * math.exp(4.5 / math.sqrt(2)) / total, rel=1e-5)
    assert coarse[0, 4] == fine[0, 2] == 0
    rows = trial.session.memory.log.take_stored()
    assert [(r.span, r.form, r.rank_k, r.rank_v) for r in rows] == [(2, "factors", 1, 1), (4, "factors", 1, 1)]
    assert [r.cold_bytes for r in rows] == [2 * (4 + 2 + 1) * 4, 2 * (9 + 2 + 1) * 4]


@pytest.mark.parametrize("seed", range(12))
def test_a_decode_step_equals_the_reference(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    params = dataclasses.replace(
        PARAMS,
        zoom_rate=float(rng.choice([0.1, 0.3, 0.6])),
        form=str(rng.choice(["smaller", "factors", "raw"])),
        energy=float(rng.choice([0.5, 0.8, 0.95])),
        alpha=float(rng.choice([0.5, 1.0])),
        max_rank=int(rng.choice([1, 3, 8])),
    )
    n = int(rng.integers(60, 140))
    budget = int(rng.choice([0.75, 0.85]) * SHAPE.full_kv_bytes(n + 4))
    trial = Trial(params, n, budget=budget, seed=seed).prefill()
    out = trial.step(0)
    zones = trial.session.memory.layout.zones
    settings = reference.Settings(
        params.alpha,
        params.l_min,
        params.l_max,
        params.window,
        params.dim,
        params.max_rank,
        params.sinks,
        params.zoom_rate,
        params.energy,
        params.form,
        int(params.anchor_share * budget) // (SHAPE.layers * SHAPE.kv_heads * (SHAPE.head_token_bytes + 9)),
        zones.recall,
    )
    for layer in range(SHAPE.layers):
        step = reference.decode_step(
            trial.keys[layer],
            trial.values[layer],
            trial.queries[layer][:, -128:],
            trial.nats,
            trial.k[layer],
            trial.v[layer],
            trial.q[layer],
            settings,
        )
        rows = trial.spans()
        assert [(a, b) for a, b, kind in rows if kind == "entropy"] == step.spans
        assert [a for a, _, kind in rows if kind == "anchor"] == step.anchors
        ids = [i + 1 for i, row in enumerate(rows) if row[2] == "entropy"]
        selection = trial.session.method.select(layer, tensor(trial.q[layer]))
        assert selection is not None
        assert np.array_equal(selection.fine.flatten(0, 1)[:, ids].numpy(), step.z)
        assert selection.index_bytes == SHAPE.group * len(ids) * params.dim * SHAPE.itemsize
        for g in range(SHAPE.kv_heads):
            hot = {i for i, span in enumerate(ids) if trial.session.memory.spans.is_hot[layer, g, span]}
            assert hot == step.hot[g]
            fetched = [ids.index(s) for s in selection.requested[g].tolist() if s >= 0 and ids.index(s) in hot]
            assert fetched == step.order[g]
        coarse, fine = trial.masses(layer)
        np.testing.assert_allclose(coarse[:, ids], step.coarse, atol=2e-5)
        np.testing.assert_allclose(fine[:, ids], step.fine, atol=2e-5)
        np.testing.assert_allclose(out[layer].numpy(), step.out, atol=1e-4)
    assert trial.session.memory.account.peak <= budget
    trial.session.close()


def test_coarse_entries_of_identical_keys_equal_full_attention() -> None:
    """What log|S| is for: |S| equal keys and one entry with the weight of |S| are the same thing."""
    trial = Trial(dataclasses.replace(PARAMS, zoom="off"), 100, seed=3)
    trial.keys[:, :, :90], trial.values[:, :, :90] = trial.keys[:, :, :1], trial.values[:, :, :1]
    out = trial.prefill().step(0)
    assert len([s for s in trial.spans() if s[2] == "entropy"]) > 3
    for layer in range(SHAPE.layers):
        np.testing.assert_allclose(out[layer].numpy(), full_attention(trial, layer), atol=1e-5)


def test_everything_expanded_exactly_equals_full_attention() -> None:
    params = dataclasses.replace(PARAMS, tau=0.0, form="raw")
    trial = Trial(params, 100, seed=4).prefill()
    out = trial.step(0)
    for layer in range(SHAPE.layers):
        np.testing.assert_allclose(out[layer].numpy(), full_attention(trial, layer), atol=1e-5)


def test_a_prompt_inside_the_window_is_full_attention_and_its_blocks_leave_later() -> None:
    trial = Trial(PARAMS, 8, max_new=30).prefill()
    out = trial.step(0)
    assert trial.spans() == []
    for layer in range(SHAPE.layers):
        np.testing.assert_allclose(out[layer].numpy(), full_attention(trial, layer), atol=1e-6)
    for step in range(1, 30):
        trial.step(step, StepEnd(step - 1, 8 + step - 1, 1.0, 1.0))
    assert trial.spans()[0] == (0, 4, "sink")
    assert trial.spans()[-1][1] >= 24


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        dataclasses.replace(PARAMS, zoom="next"),
        dataclasses.replace(PARAMS, zoom="off"),
        dataclasses.replace(PARAMS, segmentation="chunks"),
        dataclasses.replace(PARAMS, segmentation="paper"),
        dataclasses.replace(PARAMS, anchors=False),
        dataclasses.replace(PARAMS, form="factors", tau=0.0),
        dataclasses.replace(PARAMS, block=3),
        dataclasses.replace(PARAMS, router="mean", anchor_share=0.0),
        dataclasses.replace(PARAMS, router="mean", piece=3, index="int8", zoom_rate=1.0, pool="share"),
        dataclasses.replace(PARAMS, router="bound", piece=5, block=3, segmentation="chunks"),
        dataclasses.replace(PARAMS, router="bound", index="int8", anchor_share=0.0),
    ],
    ids=[
        "sync",
        "next",
        "off",
        "chunks",
        "paper",
        "no-anchors",
        "all-factors",
        "small-blocks",
        "means",
        "pieces",
        "bound-chunks",
        "bounds",
    ],
)
def test_the_budget_holds_while_blocks_leave(params: SeKVParameters) -> None:
    """The account refuses to pass the limit; here it is reached at the smallest feasible budget, one byte less is
    refused."""
    with pytest.raises(BudgetInfeasible) as refused:
        Trial(params, 90, budget=1000, max_new=40).prefill()
    smallest = refused.value.smallest
    with pytest.raises(BudgetInfeasible) as again:
        Trial(params, 90, budget=smallest - 1, max_new=40).prefill()
    assert again.value.smallest == smallest
    trial = Trial(params, 90, budget=smallest, max_new=40).prefill()
    peaks = []
    for step in range(40):
        trial.step(step, StepEnd(step - 1, 90 + step - 1, float(trial.rng.exponential()), 1.0) if step else None)
        peaks.append(trial.session.memory.account.peak)
    assert max(peaks) <= smallest
    spans = trial.spans()
    edges = [spans[0][0], *(b for _, b, _ in spans)]
    assert edges == [a for a, _, _ in spans] + [spans[-1][1]], "spans follow one another"
    assert spans[-1][1] > 90, "decoded tokens became spans"
    trial.session.close()


@pytest.mark.parametrize("router", ["mean", "bound"])
@pytest.mark.parametrize("index", ["exact", "int8"])
@pytest.mark.parametrize("piece", [0, 4])
def test_spans_are_ranked_by_their_best_piece(piece: int, index: str, router: str) -> None:
    """Scores and the order of wishes against float64 NumPy; the bytes it holds are those the layout counts."""
    params = dataclasses.replace(PARAMS, router=router, piece=piece, index=index, zoom_rate=1.0)
    trial = Trial(params, 110, seed=11).prefill()
    trial.step(0)
    ids = [i + 1 for i, row in enumerate(trial.spans()) if row[2] == "entropy"]
    assert len(ids) > 3
    nats = np.nan_to_num(trial.nats)
    for layer in range(SHAPE.layers):
        selection = trial.session.method.select(layer, tensor(trial.q[layer]))
        assert selection is not None
        assert selection.fine[..., ids].all(), "at a rate of 1 every head asks for every span"
        vectors = 0
        for g in range(SHAPE.kv_heads):
            expected = []
            for start, end, _ in (trial.spans()[i - 1] for i in ids):
                count = math.ceil((end - start) / piece) if piece else 1
                edges = [start + (end - start) * i // count for i in range(count + 1)]
                vectors += count * (2 if router == "bound" else 1)
                best = -math.inf
                for a, b in itertools.pairwise(edges):
                    keys, q = trial.keys[layer, g, a:b], trial.q[layer, 2 * g : 2 * g + 2]
                    if router == "mean":
                        logits = q @ (nats[a:b] / nats[a:b].sum() @ keys) / math.sqrt(SHAPE.head_dim) + math.log(b - a)
                    else:
                        logits = np.maximum(q * keys.max(0), q * keys.min(0)).sum(1) / math.sqrt(SHAPE.head_dim)
                    best = max(best, float(logits.max()))
                expected.append(best)
            np.testing.assert_allclose(selection.score[g, ids].numpy(), expected, atol=0.1 if index == "int8" else 1e-4)
            if index == "exact":
                order = [ids[i] for i in np.argsort(expected)[::-1]]
                assert [s for s in selection.requested[g].tolist() if s >= 0] == order
        vector = SHAPE.head_dim * 4 if index == "exact" else SHAPE.head_dim + 4
        assert selection.index_bytes == vectors // SHAPE.kv_heads * vector
    spans, n = trial.session.memory.spans.rows[1:], trial.n
    held = sum(x.numel() * x.element_size() for x in trial.session.method.held()["routing"])
    plan = sekv_layout.plan(params, [Span(s.tok_start, s.tok_end, s.kind, "") for s in spans], n, 4)
    assert held == sekv_layout.router_bytes(params, SHAPE, plan)


def test_expansion_without_reconstruction_is_read_as_no_expansion() -> None:
    outputs = [
        Trial(dataclasses.replace(PARAMS, **switch), 90, seed=5).prefill().step(0)
        for switch in ({"zoom": "off"}, {"reconstruction": False})
    ]
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], Trial(PARAMS, 90, seed=5).prefill().step(0))


def test_zoom_next_reads_at_the_following_step_what_it_asked_for() -> None:
    late, sync, off = (
        Trial(dataclasses.replace(PARAMS, zoom=zoom), 90, seed=6).prefill() for zoom in ("next", "sync", "off")
    )
    first, first_sync, first_off = (trial.step(0) for trial in (late, sync, off))
    torch.testing.assert_close(
        first, first_off, atol=1e-6, rtol=1e-6
    )  # pools of different size may sum in another order
    assert not torch.allclose(first_sync, first_off)
    second, second_sync = (trial.step(1, StepEnd(0, 90, 1.0, 1.0), q=trial.q) for trial in (late, sync))
    torch.testing.assert_close(second, second_sync, atol=1e-5, rtol=1e-5)


def test_rows_of_the_cold_tier_tell_of_the_units_they_name() -> None:
    """KV heads differ in rank and bytes, so that a row under another head's name is a wrong one."""
    params = dataclasses.replace(PARAMS, form="factors", energy=0.8, max_rank=8)
    memory = Trial(params, 120).prefill().session.memory
    rows, moved = memory.log.take_stored(), memory.take_transfers()
    sizes = {(row.layer, row.kv_head, row.span): row.bytes for row in moved}
    assert len(sizes) == len(rows) == len(moved) > 0
    for row in rows:
        _, _, rank_k, rank_v = memory.host.cold.table[row.layer, row.kv_head, row.span].tolist()
        unit = memory.host.cold.unit(row.layer, row.span, row.kv_head)
        assert (row.form, row.rank_k, row.rank_v, row.cold_bytes) == ("factors", rank_k, rank_v, unit.nbytes)
        assert sizes[row.layer, row.kv_head, row.span] == unit.nbytes
    assert any(size != sizes[layer, 1 - head, span] for (layer, head, span), size in sizes.items())


def test_the_thresholds_that_are_noted_tell_what_is_expanded() -> None:
    """A query head expands a span where its own score is above its noted threshold; the logged score is the group's
    largest."""
    trial = Trial(PARAMS, 90, seed=9).prefill()
    noted = {note.layer: note.values for note in trial.session.method.drain_journal() if note.name == "logit_tau"}
    assert sorted(noted) == [0, 1]
    trial.step(0)
    for layer in range(SHAPE.layers):
        selection = trial.session.method.select(layer, tensor(trial.q[layer]))
        assert selection is not None
        below_all = selection.score < noted[layer].unflatten(0, (SHAPE.kv_heads, -1)).amin(1, keepdim=True)
        assert not (selection.fine.any(1) & below_all).any()
        assert selection.fine.any()


def test_trained_router_is_refused_with_what_to_do(tmp_path: Path) -> None:
    params = dataclasses.replace(PARAMS, router="trained")
    with pytest.raises(ValueError, match="router=pca"):
        Trial(params, 90)
    with pytest.raises(ValueError, match="does not exist"):
        Trial(dataclasses.replace(params, router_file=str(tmp_path / "no.safetensors")), 90)
    path = tmp_path / "r.safetensors"
    save_router(Router("trained", torch.zeros(2, 4, 3, 8), torch.zeros(2, 4)), path)
    with pytest.raises(ValueError, match="routes in 3 dimensions"):
        Trial(dataclasses.replace(params, router_file=str(path)), 90)
    save_router(Router("trained", torch.zeros(5, 4, 4, 8), torch.zeros(5, 4)), path)
    with pytest.raises(ValueError, match="this model has 2"):
        Trial(dataclasses.replace(params, router_file=str(path)), 90)


def test_floor_needs_no_torch_and_grows_with_the_prompt() -> None:
    floors = [SeKV.floor_bytes(PARAMS, SHAPE, n, 16) for n in (4, 50, 200, 800)]
    assert floors == sorted(floors)


def test_parameters_refuse_nonsense() -> None:
    for bad in ({"l_min": 0}, {"l_max": 5}, {"zoom_rate": 1.5}, {"tau": 1.0}, {"sinks": -1}, {"piece": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            dataclasses.replace(PARAMS, **bad)


def test_a_routing_space_larger_than_a_key_is_refused_with_a_sentence() -> None:
    with raises_code("dim_too_large", dim=4096):
        Trial(dataclasses.replace(PARAMS, dim=4096), 90)
