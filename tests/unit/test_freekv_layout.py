"""FreeKV's arithmetic and parameters: floors to the byte, pages that partition the text, scores that bound, bad
input."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from freekv_trial import PARAMS, SHAPE, Trial
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.budget import BudgetInfeasible
from kvlens.kernels.page_scores import bound
from kvlens.methods.families import cold_plan
from kvlens.methods.families.cold_pages import best
from kvlens.methods.freekv import score as freekv_score
from kvlens.methods.freekv.method import FreeKV
from kvlens.methods.freekv.params import FreeKVParameters
from kvlens.methods.parameters import make_parameters


@pytest.mark.parametrize(
    "params",
    [
        dataclasses.replace(PARAMS, tokens=0),
        PARAMS,
        dataclasses.replace(PARAMS, tokens=0, dense_layers=0),
        dataclasses.replace(PARAMS, tokens=0, window_rule="at_least"),
        dataclasses.replace(PARAMS, tokens=0, dense_layers=3),
    ],
    ids=["budget", "tokens", "no-dense", "at-least", "all-dense"],
)
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
        rooms.append(trial.session.memory.layout.zones_of(1).recall)
        for step in range(12):
            trial.step(step)
            assert trial.session.memory.account.peak <= floor + more
    assert rooms[0] == 6 < rooms[1] < rooms[2]
    assert rooms[3] == 0, "everything fits, so it is laid out as FullKV"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 30),
    st.integers(1, 12),
    st.sampled_from(("average", "at_least", "at_most")),
    st.integers(1, 120),
    st.integers(1, 60),
)
def test_pages_partition_and_leave_in_time(sinks: int, window: int, page: int, rule: str, n: int, max_new: int) -> None:
    try:
        params = FreeKVParameters(tokens=0, sinks=sinks, window=window, page=page, window_rule=rule)
    except ValueError:
        assert window + {"average": page // 2, "at_least": page - 1, "at_most": 0}[rule] < page
        return
    first = min(sinks, n)
    starts = [cold_plan.window_from(params, first, tokens) for tokens in range(n + 1, n + max_new + 1)]
    assert starts[0] <= n, "the window begins inside the prompt, or at its end"
    for tokens, start in enumerate(starts, n + 1):
        assert (start - first) % page == 0
        assert tokens - start <= params.ring
        if start > first:
            assert tokens - start + page > params.ring, "no page leaves before it must"
    assert all(b - a in (0, page) for a, b in itertools.pairwise(starts)), "one page at a time"
    plan = cold_plan.smallest_plan(params, SHAPE, n, max_new, page)
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
    highest = (q @ keys.transpose(-1, -2)).unflatten(-1, (pages, page)).amax(-1)
    low, high = freekv_score.summarise(keys.unflatten(1, (pages, page))).chunk(2, -1)
    assert (bound(q, low, high) >= highest - 1e-5).all()


def test_scores_far_apart_are_still_ranked() -> None:
    """Unscaled scores of large heads differ by hundreds: their softmax underflows to zero, their logarithm does not."""
    summary = torch.zeros(1, 4, 4)
    summary[0, :, ::2] = torch.tensor([-300.0, 500.0, -200.0, 100.0])[:, None]
    scores = freekv_score.page_scores(torch.tensor([[[1.0, 0.0]] * 2]), summary, torch.tensor(4), "MeanS", 1.0)
    assert best(scores, 4)[0].tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sinks": -1}, "sinks must be at least 0"),
        ({"page": 0}, "page must be at least 1"),
        ({"tau": 1.2}, "tau must lie between"),
        ({"tau": -0.1}, "tau must lie between"),
        ({"window": 4, "page": 32}, "window=4 is too small"),
        ({"tokens": 200}, "tokens must be 0 or at least 288"),
        ({"pooling": "mean"}, "'pooling' is one of"),
        ({"dense_layers": -1}, "dense_layers must be at least 0"),
        ({"recall": "none"}, "'recall' is one of"),
    ],
)
def test_bad_parameters_are_one_sentence(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        make_parameters(FreeKV, None, changes)
    assert str(refused.value).startswith("freekv")
    assert "\n" not in str(refused.value)
