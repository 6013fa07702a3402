"""FreeKV on real memory tiers: by hand, against the NumPy reference, its two ends of tau, its bytes and its tiers."""

from __future__ import annotations

import dataclasses
import math

import freekv_reference as reference
import numpy as np
import pytest
import torch
from freekv_trial import PARAMS, SHAPE, Trial, tensor

from kvlens.methods.families.cold_pages import best
from kvlens.methods.freekv import score as freekv_score
from kvlens.methods.freekv.params import POOLINGS, FreeKVParameters
from kvlens.shape import KVShape

HAND_KEYS = {0: [(1, 0), (0, 1)], 1: [(2, 0), (2, 0)], 2: [(0, 3), (0, 3)], 3: [(-4, 0), (0, -4)]}
"""Four pages A, B, C, D of two keys: limits A (0,0)-(1,1), B (2,0)-(2,0), C (0,3)-(0,3), D (-4,-4)-(0,0)."""
A, B, C, D = range(4)


@pytest.mark.parametrize(
    ("pooling", "ranking"),
    [
        ("MeanQK", [D, A, C, B]),
        ("MaxQK", [D, B, A, C]),
        ("MeanQ", [C, A, B, D]),
        ("MaxQ", [B, A, C, D]),
        ("MeanS", [D, B, A, C]),
        ("MaxS", [D, B, A, C]),
    ],
)
def test_the_six_poolings_by_hand(pooling: str, ranking: list[int]) -> None:
    """Queries (3, 0) and (-3, 0.5). Bounds of the first: A 3, B 6, C 0, D 0; of the second: A 0.5, B -6, C 1.5, D 12.

    MeanQK: A 1.75, B 0, C 0.75, D 6. MaxQK: A 3, B 6, C 1.5, D 12. Mean query (0, 0.25): A 0.25, B 0, C 0.75, D 0, of
    the equal ones the older first. Largest query (3, 0.5): A 3.5, B 6, C 1.5, D 0. Softmax of the first: A .0472, B
    .9481, C .0024, D .0024; of the second D .99996, A 1.0e-5, C 2.8e-5: means A .0236, B .4741, C .0012, D .5012.
    """
    keys = tensor(np.array([HAND_KEYS[page] for page in range(4)]))[None]
    summary = freekv_score.summarise(keys)
    assert summary[0].tolist() == [[0, 0, 1, 1], [2, 0, 2, 0], [0, 3, 0, 3], [-4, -4, 0, 0]]
    q = torch.tensor([[[3.0, 0.0], [-3.0, 0.5]]])
    scores = freekv_score.page_scores(q, summary, torch.tensor(4), pooling, 1.0)
    assert best(scores, 4)[0].tolist() == ranking
    if pooling == "MeanS":
        shares = freekv_score.published(scores, pooling)[0]
        torch.testing.assert_close(shares, torch.tensor([0.0236, 0.4741, 0.0012, 0.5012]), atol=1e-4, rtol=0)
    only = freekv_score.page_scores(q, summary, torch.tensor(2), pooling, 1.0)
    assert best(only, 3)[0].tolist() in ([A, B, -1], [B, A, -1])


@pytest.mark.parametrize(
    ("tau", "reads", "corrected"),
    [
        (0.5, [B, B, C], [None, 0, 0]),
        (0.8, [B, C, C], [None, 1, 0]),
        (0.0, [B, B, C], [None, 0, 0]),
        (1.0, [B, C, C], [None, 1, 1]),
    ],
)
def test_speculation_and_correction_by_hand(tau: float, reads: list[int], corrected: list[int | None]) -> None:
    """One head, pages A to D after two sinks, room for one page. Queries (2, 0), (1.2, 1.6) and again (1.2, 1.6):
    bounds of the first A 2, B 4, C 0, D 0, so B; of the second A 2.8, B 2.4, C 4.8, D 0, so C. Their cosine is 0.6,
    then 1.

    Step 0 blocks and reads B. At step 1 tau = 0.5 finds the query near enough, reads B again and brings C for step 2;
    tau = 0.8 corrects and reads C at once. tau = 0 never corrects, tau = 1 always, also at step 2 where the cosine is
    1.
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
        # The window holds three tokens at most, so at step 2 (14 tokens) the page 10, 11 has left it and is a
        # candidate, but not read.
        assert positions[0] == [0, 1, 2 + 2 * read, 3 + 2 * read, *{0: (10, 11), 1: (10, 11, 12), 2: (12, 13)}[step]]
        assert selection.fine[0, 0].nonzero().flatten().tolist() == [2 + read]
        assert selection.requested[0].tolist() == [2 + (B, C, C)[step]]
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
    trial.session.memory.host.arrivals.settle()
    return trial.session.memory.transfers.drain()


CASES = [
    *(dataclasses.replace(PARAMS, pooling=pooling) for pooling in POOLINGS),
    *(dataclasses.replace(PARAMS, tau=tau) for tau in (0.0, 0.95, 1.0)),
    *(dataclasses.replace(PARAMS, correction_pooling=pooling) for pooling in ("max", "min")),
    *(dataclasses.replace(PARAMS, window_rule=rule) for rule in ("at_least", "at_most")),
    dataclasses.replace(PARAMS, recall="all"),
    dataclasses.replace(PARAMS, score_scale="sqrt_d"),
    dataclasses.replace(PARAMS, sinks=0, dense_layers=0),
    dataclasses.replace(PARAMS, page=1, window=5, tokens=12),
]


@pytest.mark.parametrize(
    "params",
    CASES,
    ids=lambda p: "-".join(str(v) for k, v in dataclasses.asdict(p).items() if v != getattr(PARAMS, k)) or "plain",
)
@pytest.mark.parametrize(("n", "seed"), [(20, 0), (101, 1)])
def test_every_step_equals_the_reference(params: FreeKVParameters, n: int, seed: int) -> None:
    """Selections, corrections, what moved and when, attended positions and outputs, while pages leave the window."""
    trial = Trial(params, n, seed=seed).prefill()
    pages = (params.tokens - params.sinks - params.window) // params.page
    plain = reference.Settings(
        params.sinks,
        params.window,
        params.page,
        pages,
        params.tau,
        params.pooling,
        params.correction_pooling,
        params.score_scale == "sqrt_d",
        params.window_rule,
        params.recall == "misses",
    )
    layers = [reference.Layer(trial.keys[layer], trial.values[layer], plain) for layer in range(SHAPE.layers)]
    for step in range(30):
        out = trial.step(step)
        for layer, slow in enumerate(layers):
            requested = slow.step(trial.k[layer], trial.v[layer], trial.q[layer])
            selection, positions = trial.seen[layer]
            if layer < params.dense_layers:
                assert selection is None
                assert positions == [list(range(n + step + 1))] * SHAPE.kv_heads
                continue
            ids = [[s - trial.first_id for s in row if s >= 0] for row in selection.requested.tolist()]
            assert ids == requested.selected, (seed, step, layer)
            assert positions == requested.positions, (seed, step, layer)
            read = [(row.nonzero().flatten() - trial.first_id).tolist() for row in selection.fine[:, 0]]
            assert read == [sorted(pages) for pages in requested.read]
            if step:
                assert selection.head_columns["corrected"].unflatten(0, (2, 2))[:, 0].tolist() == requested.corrected
                np.testing.assert_allclose(selection.kv_columns["similarity"].numpy(), requested.similarity, atol=1e-6)
            assert trial.moved(layer, True) == requested.blocking
            assert trial.moved(layer, False) == requested.background
            np.testing.assert_allclose(out[layer].numpy(), requested.out, atol=2e-5)
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
    assert trial.session.memory.hot.oldest > 101, "decoded tokens became pages"


def test_bytes_at_every_step_are_misses_times_the_unit() -> None:
    for recall in ("misses", "all"):
        trial = Trial(dataclasses.replace(PARAMS, recall=recall), 101).prefill()
        unit = PARAMS.page * SHAPE.head_token_bytes
        for step in range(30):
            trial.step(step)
            counts = trial.session.memory.host.recaller.counts
            moved = np.zeros((SHAPE.layers, SHAPE.kv_heads))
            for entry in trial.session.memory.transfers.opened:
                if entry.direction == "h2d":
                    np.add.at(moved, (entry.layers, entry.kv_heads), entry.sizes)
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
    assert trial.session.memory.transfers.total == {"h2d": 0, "d2h": 0}
    enough = Trial(dataclasses.replace(PARAMS, tokens=70), 40).prefill()
    enough.step(0)
    assert enough.seen[2][0] is None, "prompt and output fit into B"


def test_tiers_are_laid_out_as_in_section_4() -> None:
    trial = Trial(PARAMS, 101).prefill()
    memory = trial.session.memory
    slots = memory.hot.slots(1)
    assert slots.keys.stride()[0] == SHAPE.head_dim, "on the device KV heads of a token lie side by side: NHD"
    assert slots.keys.stride()[1] == SHAPE.head_dim * SHAPE.kv_heads
    pool = memory.host.cold.layer(1)
    assert pool.shape[1:] == (SHAPE.kv_heads, 2, PARAMS.page, SHAPE.head_dim)
    unit = memory.host.cold.unit(1, trial.first_id, 0)
    assert unit.is_contiguous()
    np.testing.assert_allclose(unit[0].numpy(), trial.keys[1, 0, 3:9], rtol=1e-6)
    assert unit.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    assert len(memory.host.arrivals.buffers) == 2
