"""McNemar's exact test: what it decides, its power and the prompts it needs, against enumeration of every outcome."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.statistics import mcnemar, sign_test
from kvlens.statistics.mcnemar import ERROR, POWER, decides, detectable, power, prompts_needed
from kvlens.statistics.paired import tango
from kvlens.studies.paired import Paired, compare
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.studies.table import Results
from kvlens.text.prompts import PromptText


def enumerated_power(n: int, only_a: float, only_b: float) -> float:
    """The power, over every outcome of n prompts, with p counted out of all orders of the split prompts."""
    total = 0.0
    for wins in range(n + 1):
        for losses in range(n + 1 - wins):
            splits, agreed = wins + losses, n - wins - losses
            fewer = sum(math.comb(splits, count) for count in range(min(wins, losses) + 1))
            if wins <= losses or min(1.0, 2 * fewer / 2**splits) >= ERROR:
                continue
            orders = math.comb(n, wins) * math.comb(n - wins, losses)
            total += orders * only_a**wins * only_b**losses * max(0.0, 1 - only_a - only_b) ** agreed
    return total


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 25), st.floats(0, 1), st.floats(0, 1))
def test_power_equals_its_enumeration(n: int, split: float, part: float) -> None:
    only_a, only_b = split * max(part, 1 - part), split * min(part, 1 - part)
    expected = enumerated_power(n, only_a, only_b)
    assert power(n, only_a, only_b) == pytest.approx(expected, abs=1e-9)
    assert power(n, only_b, only_a) == power(n, only_a, only_b)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 10), st.integers(0, 3))
def test_the_prompts_needed_are_the_fewest_with_the_power(tenths: int, fewer: int) -> None:
    only_a, only_b = tenths / 10, min(fewer, tenths - 1, 10 - tenths) / 10
    if only_a - only_b < 0.4:
        return
    needed = prompts_needed(only_a, only_b)
    enough = [n for n in range(needed + 1) if enumerated_power(n, only_a, only_b) >= POWER - 1e-12]
    assert enough == [needed]


@pytest.mark.parametrize(
    ("only_a", "only_b", "needed"),
    [(1.0, 0.0, 6), (4 / 6, 0.0, 11), (0.2, 0.1, 249)],  # Connor's formula: 4, 10 and 234
)
def test_how_many_prompts_decide(only_a: float, only_b: float, needed: int) -> None:
    assert prompts_needed(only_a, only_b) == prompts_needed(only_b, only_a) == needed
    assert power(needed, only_a, only_b) >= POWER > power(needed - 1, only_a, only_b)


def test_equal_shares_need_no_number() -> None:
    with pytest.raises(ValueError, match="no number"):
        prompts_needed(0.2, 0.2)


def test_beyond_the_exact_sums_the_number_is_near_them(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = prompts_needed(0.2, 0.16)
    monkeypatch.setattr(mcnemar, "EXACT", 1024)
    assert 1024 < prompts_needed(0.2, 0.16) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("n", [1, 5, 6, 7, 20, 100])
def test_the_smallest_difference_of_a_plan_has_the_power(n: int) -> None:
    smallest = detectable(n)
    if n < 6:
        assert smallest is None
        assert power(n, 1.0, 0.0) == 0
        return
    assert smallest is not None
    assert power(n, smallest, 0.0) >= POWER > power(n, smallest - 0.001, 0.0)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_the_test_decides_only_where_the_interval_excludes_0(only_a: int, only_b: int, agreed: int) -> None:
    """So that the interval, extended where the test does not decide, and the test never disagree."""
    assert decides(only_a, only_b) is (sign_test(only_a, only_b) < ERROR)
    if decides(only_a, only_b):
        low, high = tango(only_a, only_b, only_a + only_b + agreed)
        assert low > 0 or high < 0


def compared(only_a: int, only_b: int, agreed: int) -> Paired:
    """Two arms that alone are right on so many prompts, and both right on the rest."""
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="snapkv"),), budgets=("20%", "10%"))
    rights = [(True, False)] * only_a + [(False, True)] * only_b + [(True, True)] * agreed
    prompts = [StudyPrompt(str(number), PromptText("x", answer="y")) for number in range(len(rights))]
    trials = [
        Trial(str(number), arm.key(), "completed", figures={"right": pair[place]})
        for place, arm in enumerate(plan.arms()[1:])
        for number, pair in enumerate(rights)
    ]
    results = Results(StudyInfo(id="20260101-000000-aaaaaa", created="", plan=plan), prompts, trials)
    return compare(results, "SnapKV 20%", "SnapKV 10%")


@pytest.mark.parametrize(
    ("counts", "p", "is_decided", "needed"),
    [
        ((4, 0, 2), 0.125, False, 11),
        ((2, 0, 0), 0.5, False, 6),
        ((0, 5, 1), 0.0625, False, 8),
        ((6, 0, 0), 0.03125, True, 6),
        ((0, 6, 10), 0.03125, True, 20),
        ((3, 3, 4), 1.0, False, None),
    ],
)
def test_one_criterion_decides(counts: tuple[int, int, int], p: float, is_decided: bool, needed: int | None) -> None:
    paired = compared(*counts)
    assert (paired.p, paired.decided, paired.needed) == (pytest.approx(p), is_decided, needed)
    assert paired.decided is not (paired.low <= 0 <= paired.high)
