"""Differences of paired shares: published worked examples, and errors by enumeration of every outcome."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from kvlens import PACKAGE
from kvlens.lab.claims.family import holm
from kvlens.lab.results.power import MOST, POWER, pairs_needed, power, rejection, trials_between, values_needed
from kvlens.lab.studies.paired_errors import RULES, largest_error
from kvlens.statistics import binomial_above, binomial_below
from kvlens.statistics.paired import (
    agresti_min,
    exceeds,
    falls_below,
    lost_shares,
    newcombe,
    outcomes,
    probabilities,
    score,
    tango,
)
from kvlens.statistics.student import Sample, quantile, tail

MARGIN = 0.1
NOMINAL = 0.025


@pytest.mark.parametrize(
    ("cells", "tango_bounds", "newcombe_bounds"),
    [
        ((1, 1, 7, 12), (-0.517, -0.026), (-0.507, -0.026)),  # Fagerland, Lydersen, Laake 2014, Table II
        ((59, 6, 16, 80), (-0.1240, -0.0054), (-0.1186, -0.0046)),  # R package contingencytables, cavo_2012
    ],
)
def test_intervals_equal_published_ones(
    cells: tuple[int, int, int, int], tango_bounds: tuple[float, float], newcombe_bounds: tuple[float, float]
) -> None:
    _, gained, lost, _ = cells
    assert tango(gained, lost, sum(cells)) == pytest.approx(tango_bounds, abs=6e-4)
    assert newcombe(*cells) == pytest.approx(newcombe_bounds, abs=6e-4)


def test_other_published_figures() -> None:
    assert tango(28, 25, 618, 0.9) == pytest.approx((-0.0148, 0.0247), abs=5e-5)  # R: PropCIs::scoreci.mp(25, 28, 618)
    assert agresti_min(6, 16, 161) == pytest.approx((-0.1182, -0.0045), abs=5e-5)
    # McNemar's exact unconditional test of the same table, there with the correction of Berger and Boos: 0.034053
    assert 2 * falls_below(6, 16, 161, 0.0) == pytest.approx(0.0341, abs=3e-4)


@pytest.mark.parametrize("n", [20, 30, 50, 100])
def test_the_error_at_the_margin_is_at_most_nominal(n: int) -> None:
    """Of every discordant share on a finer grid than the test's own."""
    rejected = rejection(n, -MARGIN, NOMINAL)
    errors = [probabilities(n, max(0.0, s - MARGIN), s)[rejected].sum() for s in lost_shares(-MARGIN, 501)]
    assert max(errors) <= NOMINAL + 1e-6
    assert max(errors) > NOMINAL / 2, "the test wastes no level"


def test_twenty_that_agree_are_not_as_good_and_thirty_six_are() -> None:
    assert exceeds(0, 0, 20, -MARGIN) == pytest.approx(0.9**20, abs=1e-6)
    assert agresti_min(0, 0, 20)[0] > -MARGIN, "the interval that was used before"
    assert exceeds(0, 0, 36, -MARGIN) < NOMINAL < exceeds(0, 0, 35, -MARGIN)


def test_the_error_is_largest_at_the_margin() -> None:
    """A larger true loss passes less often."""
    rejected = rejection(20, -MARGIN, NOMINAL)
    for loss in (0.15, 0.3, 0.6):
        errors = [probabilities(20, max(0.0, s - loss), s)[rejected].sum() for s in lost_shares(-loss, 101)]
        assert max(errors) <= NOMINAL


def test_p_and_region_agree_and_probabilities_add_up() -> None:
    n = 12
    gained, lost, _ = outcomes(n)
    assert len(gained) == (n + 1) * (n + 2) // 2
    assert probabilities(n, 0.2, 0.3).sum() == pytest.approx(1)
    rejected = rejection(n, -0.3, 0.05)
    values = np.array([exceeds(int(up), int(down), n, -0.3) for up, down in zip(gained, lost, strict=True)])
    assert ((values <= 0.05) == rejected).all()


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 30))
def test_an_interval_of_paired_shares(gained: int, lost: int, n: int) -> None:
    if gained + lost > n:
        return
    low, high = tango(gained, lost, n)
    assert -1 <= low <= (gained - lost) / n <= high <= 1
    assert tango(lost, gained, n) == pytest.approx((-high, -low), abs=1e-8)
    for bound, sign in ((low, 1), (high, -1)):
        if -1 + 1e-6 < bound < 1 - 1e-6 and abs(gained - lost) < n:
            statistic = score(np.array([gained], float), np.array([lost], float), n, bound)[0]
            assert sign * statistic == pytest.approx(1.96, abs=1e-3)


def test_students_t_by_its_tables() -> None:
    for share, freedom, value in ((0.975, 9, 2.262), (0.975, 1, 12.706), (0.95, 2, 2.920), (0.995, 29, 2.756)):
        assert quantile(share, freedom) == pytest.approx(value, abs=6e-4)
        assert tail(-value, freedom) == pytest.approx(share, abs=1e-4)
    assert quantile(0.025, 9) == -quantile(0.975, 9)


def test_values_that_all_agree_are_no_proof() -> None:
    assert Sample(10, 0.2, 0.0).exceeds(0.0) == 2.0**-10
    assert Sample(10, 0.0, 0.0).exceeds(0.0) == 0.5
    assert Sample(10, -0.2, 0.1).falls_below(0.0) == Sample(10, 0.2, 0.1).exceeds(0.0)


@pytest.mark.parametrize("truth", [0.0, 0.05])
def test_a_plan_has_its_power(truth: float) -> None:
    n = pairs_needed(-MARGIN, truth, 0.06, 0.0125)
    assert power(n, -MARGIN, truth, 0.06, 0.0125) >= 0.8
    assert power(n // 2, -MARGIN, truth, 0.06, 0.0125) < 0.8


def test_plans_grow_with_what_they_have_to_show() -> None:
    assert pairs_needed(-MARGIN, 0.0, 0.2, 0.0125) > pairs_needed(-MARGIN, 0.0, 0.2, 0.025)
    assert pairs_needed(-MARGIN, 0.0, 0.4, 0.025) > pairs_needed(-MARGIN, 0.0, 0.2, 0.025)
    assert pairs_needed(0.0, MARGIN, 0.0, 0.025) == pairs_needed(0.0, MARGIN, MARGIN, 0.025)
    assert values_needed(0.5, 1.0, 0.025) == pytest.approx(34, abs=1)  # Student's table: 34 for an effect of half


def test_holm_rejects_step_by_step() -> None:
    assert holm([0.01, 0.02, 0.005], 0.025) == [True, True, True]
    assert holm([0.01, 0.03, 0.005], 0.025) == [True, False, True]
    assert holm([0.009, 0.013], 0.025) == [True, True]
    assert holm([0.013, 0.014], 0.025) == [False, False]
    assert holm([]) == []


def test_binomial_tails() -> None:
    assert binomial_above(5, 5, 0.5) == pytest.approx(2**-5)
    assert binomial_below(0, 30, 0.1) == pytest.approx(0.9**30)
    assert binomial_above(0, 5, 0.3) == pytest.approx(1)


def test_the_evidence_page_states_the_largest_errors() -> None:
    page = (PACKAGE.parent / "docs" / "evidence" / "paired.md").read_text(encoding="utf-8")
    for rule in RULES:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {rule} |"))
        assert row.split("|")[3].strip() == f"{largest_error(rule, 20):.1%}"


def test_trials_that_place_a_share_between_two_bounds() -> None:
    low, high, share, level = 0.05, 0.2, 0.12, 0.01
    n = trials_between(low, high, share, level)
    counts = np.random.default_rng(0).binomial(n, share, 4000)
    above = binom.sf(counts - 1, n, low) <= level
    below = binom.cdf(counts, n, high) <= level
    assert POWER - 0.02 <= float((above & below).mean()) <= POWER + 0.06
    assert trials_between(low, high, 0.08, level) > n, "nearer to a bound"
    assert trials_between(low, high, 0.0501, level) == MOST
