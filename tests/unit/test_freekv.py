"""FreeKV on real memory tiers: by hand, against the NumPy reference, its two ends of tau, its bytes, its budget."""

from __future__ import annotations

import dataclasses
import itertools
import math

import freekv_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.budget import BudgetInfeasible
from kvlens.methods import freekv_layout, freekv_score
from kvlens.methods.base import RunContext, StepEnd, make_parameters
from kvlens.methods.freekv import FreeKV
from kvlens.methods.freekv_params import POOLINGS, FreeKVParameters
from kvlens.session import Session
from kvlens.shape import KVShape

SHAPE = KVShape(layers=3, q_heads=4, kv_heads=2, head_dim=8, itemsize=4)
PARAMS = FreeKVParameters(tokens=29, sinks=3, window=8, page=6, tau=0.6, dense_layers=1)
"""three selected pages of six tokens"""


class Trial:
    """A session driven by hand with its own record of all keys and values; watches what every layer did."""

    def __init__(
        self, params: FreeKVParameters, n: int, shape: KVShape = SHAPE, budget: int | None = None, max_new: int = 30, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.shape, self.n, self.params = rng, shape, n, params
        context = RunContext(shape, n, max_new, budget, shape.full_kv_bytes(n + max_new), seed, "tiny", torch.float32, torch.device("cpu"))
        self.session = Session(FreeKV, params, context)
        self.keys, self.values = rng.standard_normal((2, shape.layers, shape.kv_heads, n, shape.head_dim))
        self.q = rng.standard_normal((shape.layers, shape.q_heads, shape.head_dim))
        self.seen: dict[int, tuple] = {}

    def layer(self, layer: int, q: torch.Tensor, bias: torch.Tensor | None, scaling: float, selection: object) -> None:
        """The session's observer: keeps the selection and which positions each KV head attended."""
        slots = self.session.memory.hot.slots(layer)
        live = self.session.memory.live_prefix(layer) if bias is None else None
        seen = torch.ones_like(slots.role[:, :live], dtype=torch.bool) if bias is None else (bias > -math.inf).all(1)
        if bias is not None:
            assert torch.equal(seen, (bias > -math.inf).any(1)), "all query heads of a group read the same"
        positions = [sorted(slots.position[head, : seen.shape[1]][seen[head]].tolist()) for head in range(self.shape.kv_heads)]
        self.seen[layer] = selection, positions

    def prefill(self) -> Trial:
        for layer in range(self.shape.layers):
            self.session.write(layer, tensor(self.keys[layer]), tensor(self.values[layer]))
            self.session.attend(layer, torch.zeros(1, self.shape.q_heads, self.n, self.shape.head_dim), self.shape.head_dim**-0.5)
        self.session.finish_prefill(torch.full((self.n,), 1.0))
        self.session.observer = self
        return self

    def step(self, step: int, q: np.ndarray | None = None, k: np.ndarray | None = None) -> torch.Tensor:
        """One decode step -> outputs [L, Hq, D]; sets q, k, v. Without a query: near the last one, or not, per head."""
        shape, rng = self.shape, self.rng
        end = StepEnd(step - 1, self.n + step - 1, 1.0, 1.0) if step else None
        self.session.begin_step(step, end)
        self.k, self.v = rng.standard_normal((2, shape.layers, shape.kv_heads, shape.head_dim))
        if k is not None:
            self.k = k
        near = rng.uniform(0.2, 1, (shape.layers, shape.q_heads, 1)) if q is None else 0
        self.q = near * self.q + (1 - near) * rng.standard_normal(self.q.shape) if q is None else q
        out = []
        for layer in range(shape.layers):
            self.session.write(layer, tensor(self.k[layer])[:, None], tensor(self.v[layer])[:, None])
            out.append(self.session.attend(layer, tensor(self.q[layer])[None, :, None], shape.head_dim**-0.5)[0, :, 0])
        return torch.stack(out)

    def moved(self, layer: int, blocking: bool) -> list[list[int]]:
        """Pages brought to the device since the step began, per KV head, in order."""
        pages: list[list[int]] = [[] for _ in range(self.shape.kv_heads)]
        for entry in self.session.memory.ledger.opened:
            if entry.direction == "h2d" and entry.layer == layer and entry.blocking == blocking:
                pages[entry.kv_head].append(entry.span - self.first_id)
                assert entry.bytes == self.params.page * self.shape.head_token_bytes
        return pages

    @property
    def first_id(self) -> int:
        return 1 + (self.params.sinks > 0)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


HAND_KEYS = {0: [(1, 0), (0, 1)], 1: [(2, 0), (2, 0)], 2: [(0, 3), (0, 3)], 3: [(-4, 0), (0, -4)]}
"""Four pages A, B, C, D of two keys: limits A (0,0)-(1,1), B (2,0)-(2,0), C (0,3)-(0,3), D (-4,-4)-(0,0)."""
A, B, C, D = range(4)


@pytest.mark.parametrize(("pooling", "ranking"), [
    ("MeanQK", [D, A, C, B]), ("MaxQK", [D, B, A, C]), ("MeanQ", [C, A, B, D]), ("MaxQ", [B, A, C, D]), ("MeanS", [D, B, A, C]),
    ("MaxS", [D, B, A, C]),
])  # fmt: skip
def test_the_six_poolings_by_hand(pooling: str, ranking: list[int]) -> None:
    """Queries (3, 0) and (-3, 0.5). Bounds of the first: A 3, B 6, C 0, D 0; of the second: A 0.5, B -6, C 1.5, D 12.

    MeanQK: A 1.75, B 0, C 0.75, D 6. MaxQK: A 3, B 6, C 1.5, D 12. Mean query (0, 0.25): A 0.25, B 0, C 0.75, D 0, of the equal ones
    the older first. Largest query (3, 0.5): A 3.5, B 6, C 1.5, D 0. Softmax of the first: A .0472, B .9481, C .0024, D .0024; of the
    second D .99996, A 1.0e-5, C 2.8e-5: means A .0236, B .4741, C .0012, D .5012.
    """
    keys = tensor(np.array([HAND_KEYS[page] for page in range(4)])).flatten(0, 1)[None]
    summary = freekv_score.summarise(keys, 2)
    assert summary[0].tolist() == [[[0, 0], [1, 1]], [[2, 0], [2, 0]], [[0, 3], [0, 3]], [[-4, -4], [0, 0]]]
    q = torch.tensor([[3.0, 0.0], [-3.0, 0.5]])
    scores = freekv_score.page_scores(q, summary, torch.ones(4, dtype=torch.bool), pooling, 1.0)
    assert freekv_score.select(scores, 4)[0].tolist() == ranking
    if pooling == "MeanS":
        shares = freekv_score.published(scores, pooling)[0]
        torch.testing.assert_close(shares, torch.tensor([0.0236, 0.4741, 0.0012, 0.5012]), atol=1e-4, rtol=0)
    only = freekv_score.page_scores(q, summary, torch.tensor([True, True, False, False]), pooling, 1.0)
    assert freekv_score.select(only, 3)[0].tolist() in ([A, B, -1], [B, A, -1])


@pytest.mark.parametrize(("tau", "reads", "corrected"), [
    (0.5, [B, B, C], [None, 0, 0]), (0.8, [B, C, C], [None, 1, 0]), (0.0, [B, B, C], [None, 0, 0]), (1.0, [B, C, C], [None, 1, 1]),
])  # fmt: skip
def test_speculation_and_correction_by_hand(tau: float, reads: list[int], corrected: list[int | None]) -> None:
    """One head, pages A to D after two sinks, room for one page. Queries (2, 0), (1.2, 1.6) and again (1.2, 1.6): bounds of the first
    A 2, B 4, C 0, D 0, so B; of the second A 2.8, B 2.4, C 4.8, D 0, so C. Their cosine is 0.6, then 1.

    Step 0 blocks and reads B. At step 1 tau = 0.5 finds the query near enough, reads B again and brings C for step 2; tau = 0.8 corrects
    and reads C at once. tau = 0 never corrects, tau = 1 always, also at step 2 where the cosine is 1.
    """
    shape = KVShape(1, 1, 1, 2, 4)
    params = FreeKVParameters(tokens=7, sinks=2, window=3, page=2, tau=tau, dense_layers=0, window_rule="at_most")
    trial = Trial(params, 11, shape, max_new=8)
    trial.keys[0, 0, 2:10] = [key for page in range(4) for key in HAND_KEYS[page]]
    trial.prefill()
    for step, q in enumerate(([2.0, 0.0], [1.2, 1.6], [1.2, 1.6])):
        trial.step(step, np.array([[q]]), k=np.zeros((1, 1, 2)))
        selection, positions = trial.seen[0]
        read = reads[step]
        # The window holds three tokens at most, so at step 2 (14 tokens) the page 10, 11 has left it and is a candidate, but not read.
        assert positions[0] == [0, 1, 2 + 2 * read, 3 + 2 * read, *{0: (10, 11), 1: (10, 11, 12), 2: (12, 13)}[step]]
        assert selection.fine[0, 0].nonzero().flatten().tolist() == [2 + read]
        assert selection.want[0].tolist() == [2 + (B, C, C)[step]]
        if corrected[step] is None:
            assert selection.now is None
            assert selection.head_columns == selection.kv_columns == {}
        else:
            assert selection.head_columns["corrected"].tolist() == [corrected[step]]
            torch.testing.assert_close(selection.kv_columns["similarity"], torch.tensor([(math.nan, 0.6, 1.0)[step]]))
    causes = [(row.step, row.cause, row.blocking, row.span - 2) for row in settled(trial) if row.direction == "h2d"]
    late = (1, "prefetch", False, C) if reads[1] == B else (1, "correction", True, C)
    assert causes == [(0, "recall", True, B), late]


def settled(trial: Trial) -> list:
    trial.session.memory.settle()
    return trial.session.memory.ledger.drain()


CASES = [
    *(dataclasses.replace(PARAMS, pooling=pooling) for pooling in POOLINGS),
    *(dataclasses.replace(PARAMS, tau=tau) for tau in (0.0, 0.95, 1.0)),
    *(dataclasses.replace(PARAMS, correction_pooling=pooling) for pooling in ("max", "min")),
    *(dataclasses.replace(PARAMS, window_rule=rule) for rule in ("at_least", "at_most")),
    dataclasses.replace(PARAMS, recall="all"), dataclasses.replace(PARAMS, score_scale="sqrt_d"),
    dataclasses.replace(PARAMS, sinks=0, dense_layers=0), dataclasses.replace(PARAMS, page=1, window=5, tokens=12),
]  # fmt: skip


@pytest.mark.parametrize("params", CASES, ids=lambda p: "-".join(
    str(v) for k, v in dataclasses.asdict(p).items() if v != getattr(PARAMS, k)) or "plain")  # fmt: skip
@pytest.mark.parametrize("n", [20, 101])
def test_every_step_equals_the_reference(params: FreeKVParameters, n: int) -> None:
    """Selections, corrections, what moved and when, attended positions and outputs, while pages leave the window."""
    for seed in range(3):
        trial = Trial(params, n, seed=seed).prefill()
        pages = (params.tokens - params.sinks - params.window) // params.page
        plain = reference.Settings(
            params.sinks, params.window, params.page, pages, params.tau, params.pooling, params.correction_pooling,
            params.score_scale == "sqrt_d", params.window_rule, params.recall == "misses",
        )  # fmt: skip
        layers = [reference.Layer(trial.keys[layer], trial.values[layer], plain) for layer in range(SHAPE.layers)]
        for step in range(30):
            out = trial.step(step)
            for layer, slow in enumerate(layers):
                want = slow.step(trial.k[layer], trial.v[layer], trial.q[layer])
                selection, positions = trial.seen[layer]
                if layer < params.dense_layers:
                    assert selection is None
                    assert positions == [list(range(n + step + 1))] * SHAPE.kv_heads
                    continue
                ids = [[s - trial.first_id for s in row if s >= 0] for row in selection.want.tolist()]
                assert ids == want.selected, (seed, step, layer)
                assert positions == want.positions, (seed, step, layer)
                read = [(row.nonzero().flatten() - trial.first_id).tolist() for row in selection.fine[:, 0]]
                assert read == [sorted(pages) for pages in want.read]
                if step:
                    assert selection.head_columns["corrected"].unflatten(0, (2, 2))[:, 0].tolist() == want.corrected
                    np.testing.assert_allclose(selection.kv_columns["similarity"].numpy(), want.similarity, atol=1e-6)
                assert trial.moved(layer, True) == want.blocking
                assert trial.moved(layer, False) == want.background
                np.testing.assert_allclose(out[layer].numpy(), want.out, atol=2e-5)
        assert sum(len(slow.chosen[0]) for slow in layers) > 0
        trial.session.close()


def test_the_cases_above_do_correct_and_do_speculate() -> None:
    trial = Trial(PARAMS, 101).prefill()
    corrected = []
    for step in range(30):
        trial.step(step)
        if step:
            corrected.append(trial.seen[1][0].head_columns["corrected"])
    share = float(torch.stack(corrected).mean())
    assert 0.1 < share < 0.9
    assert trial.session.memory.window_start > 101, "decoded tokens became pages"


def test_bytes_at_every_step_are_misses_times_the_unit() -> None:
    for recall in ("misses", "all"):
        trial = Trial(dataclasses.replace(PARAMS, recall=recall), 101).prefill()
        unit = PARAMS.page * SHAPE.head_token_bytes
        for step in range(30):
            trial.step(step)
            counts = trial.session.memory.recaller.counts
            moved = np.zeros((SHAPE.layers, SHAPE.kv_heads))
            for entry in trial.session.memory.ledger.opened:
                if entry.direction == "h2d":
                    moved[entry.layer, entry.kv_head] += entry.bytes
            np.testing.assert_array_equal(moved, counts["n_recalled"] * unit)
            np.testing.assert_array_equal((counts["n_recalled"] + counts["n_reused"])[1:], 3)
            if recall == "all":
                assert (counts["n_reused"][1:] == 0).all()
                assert (counts["ideal_bytes"][1:] <= moved[1:]).all()
        trial.session.close()


def test_reuse_or_not_reads_the_same() -> None:
    trials = [Trial(dataclasses.replace(PARAMS, recall=recall), 101).prefill() for recall in ("misses", "all")]
    for step in range(20):
        a, b = (trial.step(step) for trial in trials)
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_without_any_limit_nothing_leaves_the_device() -> None:
    trial = Trial(dataclasses.replace(PARAMS, tokens=0), 40).prefill()
    for step in range(30):
        trial.step(step)
        assert all(selection is None for selection, _ in trial.seen.values())
    assert trial.session.memory.ledger.total == {"h2d": 0, "d2h": 0}
    enough = Trial(dataclasses.replace(PARAMS, tokens=70), 40).prefill()
    enough.step(0)
    assert enough.seen[2][0] is None, "prompt and output fit into B"


def test_tiers_are_laid_out_as_in_section_4() -> None:
    trial = Trial(PARAMS, 101).prefill()
    memory = trial.session.memory
    slots = memory.hot.slots(1)
    assert slots.keys.stride()[0] == SHAPE.head_dim, "on the device KV heads of a token lie side by side: NHD"
    assert slots.keys.stride()[1] == SHAPE.head_dim * SHAPE.kv_heads
    pool = memory.cold._pool
    assert pool is not None
    assert pool.shape[2:] == (SHAPE.kv_heads, 2, PARAMS.page, SHAPE.head_dim)
    unit = memory.cold.get(1, trial.first_id, 0).payload
    assert unit.is_contiguous()
    np.testing.assert_allclose(unit[0].numpy(), trial.keys[1, 0, 3:9], rtol=1e-6)
    assert unit.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    assert len(memory.recaller.buffers) == 2


@pytest.mark.parametrize("params", [
    dataclasses.replace(PARAMS, tokens=0), PARAMS, dataclasses.replace(PARAMS, tokens=0, dense_layers=0),
    dataclasses.replace(PARAMS, tokens=0, window_rule="at_least"), dataclasses.replace(PARAMS, tokens=0, dense_layers=3),
], ids=["budget", "tokens", "no-dense", "at-least", "all-dense"])  # fmt: skip
@pytest.mark.parametrize("n", [2, 12, 120])
def test_the_floor_is_exact_and_kept(params: FreeKVParameters, n: int) -> None:
    with pytest.raises(BudgetInfeasible) as refused:
        Trial(params, n, budget=10).prefill()
    smallest = refused.value.smallest
    assert smallest == FreeKV.floor_bytes(params, SHAPE, n, 30)
    with pytest.raises(BudgetInfeasible):
        Trial(params, n, budget=smallest - 1).prefill()
    trial = Trial(params, n, budget=smallest).prefill()
    peaks = []
    for step in range(30):
        trial.step(step)
        peaks.append(trial.session.memory.account.peak)
    assert max(peaks) == smallest
    trial.session.close()


def test_a_larger_budget_is_used_and_never_passed() -> None:
    params = dataclasses.replace(PARAMS, tokens=0)
    floor, rooms = FreeKV.floor_bytes(params, SHAPE, 200, 30), []
    for more in (0, 3000, 9000, 10**6):
        trial = Trial(params, 200, budget=floor + more).prefill()
        rooms.append(trial.session.memory.layout.of(1).recall)
        for step in range(12):
            trial.step(step)
            assert trial.session.memory.account.peak <= floor + more
    assert rooms[0] == 6 < rooms[1] < rooms[2]
    assert rooms[3] == 0, "everything fits, so it is laid out as FullKV"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 9), st.integers(1, 30), st.integers(1, 12), st.sampled_from(("average", "at_least", "at_most")), st.integers(1, 120),
    st.integers(1, 60),
)  # fmt: skip
def test_pages_partition_and_leave_in_time(sinks: int, window: int, page: int, rule: str, n: int, max_new: int) -> None:
    try:
        params = FreeKVParameters(tokens=0, sinks=sinks, window=window, page=page, window_rule=rule)
    except ValueError:
        assert window + {"average": page // 2, "at_least": page - 1, "at_most": 0}[rule] < page
        return
    first = min(sinks, n)
    starts = [freekv_layout.window_from(params, first, tokens) for tokens in range(n + 1, n + max_new + 1)]
    assert starts[0] <= n, "the window begins inside the prompt, or at its end"
    for tokens, start in enumerate(starts, n + 1):
        assert (start - first) % page == 0
        assert tokens - start <= params.ring
        if start > first:
            assert tokens - start + page > params.ring, "no page leaves before it must"
    assert all(b - a in (0, page) for a, b in itertools.pairwise(starts)), "one page at a time"
    plan = freekv_layout.smallest_plan(params, SHAPE, n, max_new)
    assert (plan is None) == (starts[-1] == first)
    if plan is not None:
        assert plan.window_from == starts[0]
        assert plan.pages * page == starts[-1] - first
        assert max(t - s for t, s in enumerate(starts, n + 1)) <= plan.ring


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 6))
def test_a_page_score_is_an_upper_bound_of_its_keys(seed: int, pages: int, page: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, pages * page, 5, generator=generator)
    q = torch.randn(2, 3, 5, generator=generator)
    best = (q @ keys.transpose(-1, -2)).unflatten(-1, (pages, page)).amax(-1)
    assert (freekv_score.bound(q, freekv_score.summarise(keys, page)) >= best - 1e-5).all()


def test_scores_far_apart_are_still_ranked() -> None:
    """Unscaled scores of large heads differ by hundreds: their softmax underflows to zero, their logarithm does not."""
    summary = torch.zeros(1, 4, 2, 2)
    summary[0, :, :, 0] = torch.tensor([-300.0, 500.0, -200.0, 100.0])[:, None]
    scores = freekv_score.page_scores(torch.tensor([[1.0, 0.0]] * 2), summary, torch.ones(4, dtype=torch.bool), "MeanS", 1.0)
    assert freekv_score.select(scores, 4)[0].tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(("changes", "words"), [
    ({"sinks": -1}, "sinks must be at least 0"), ({"page": 0}, "page must be at least 1"), ({"tau": 1.2}, "tau must lie between"),
    ({"tau": -0.1}, "tau must lie between"), ({"window": 4, "page": 32}, "window=4 is too small"),
    ({"tokens": 200}, "tokens must be 0 or at least 288"), ({"pooling": "mean"}, "'pooling' is one of"),
    ({"dense_layers": -1}, "dense_layers must be at least 0"), ({"recall": "none"}, "'recall' is one of"),
])  # fmt: skip
def test_bad_parameters_are_one_sentence(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        make_parameters(FreeKV, None, changes)
    assert str(refused.value).startswith("freekv")
    assert "\n" not in str(refused.value)
