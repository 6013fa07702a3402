"""FreeKV's claims: the verdicts follow the figures."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.methods.freekv import claims
from kvlens.methods.freekv.claims import Seen


def trials(rights: list[float], corrected: float = 0.0) -> list[Seen]:
    return [Seen(right=right, corrected=[corrected], moved=10.0, blocking=10 * corrected) for right in rights]


def test_similarity_is_high_only_if_every_head_is() -> None:
    cosine = np.full((5, 2, 4), 0.9)
    cosine[:, 0] = 0.85
    high, first = claims._similarity(cosine, "here")
    assert (high.holds, first.holds) == (True, True)
    cosine[:, 1, 2] = 0.75
    high, first = claims._similarity(cosine, "here")
    assert (high.holds, first.holds) == (False, True)
    assert "lowest 0.750 (layer 1, query head 2)" in high.measured
    assert "88% of 8 heads" in high.measured


def test_max_pooling_never_corrects_more() -> None:
    cosine = np.random.default_rng(0).uniform(0.5, 1, (40, 3, 8))
    claim = claims._max_pooling(cosine, 4, "here")
    assert claim.holds is False
    assert claim.figures["max"] < claim.figures["mean"] < claim.figures["min"]


def test_steps_below_tau_in_some_heads_only() -> None:
    cosine = np.full((4, 1, 4), 0.9)
    cosine[:3, 0, :2] = 0.1
    assert claims._head_specific(cosine, 2, "here").figures == {"share_of_steps_some_not_all": 0.75}
    cosine[:] = 0.1
    assert claims._head_specific(cosine, 2, "here").holds is False


def test_correction_rates_rise_and_are_compared_with_the_table() -> None:
    rates = {0.0: 0.0, 0.7: 0.05, 0.8: 0.1, 0.9: 0.3, 1.0: 1.0}
    rising, few = claims._rates({tau: trials([1.0], rate) for tau, rate in rates.items()}, "here")
    assert (rising.holds, few.holds) == (True, True)
    rising, few = claims._rates({tau: trials([1.0], rate) for tau, rate in (rates | {0.8: 0.6}).items()}, "here")
    assert (rising.holds, few.holds) == (False, False)


@pytest.mark.parametrize(("without", "holds"), [([0.1] * 10, True), ([0.9] * 10, None), ([1.0] * 10, False)])
def test_what_correction_buys(without: list[float], holds: bool | None) -> None:
    arms = {tau: trials([0.9] * 10) for tau in claims.TAUS}
    assert claims._accuracy(arms | {0.0: trials(without)}, "here").holds is holds


def test_the_best_pooling_is_named_only_beyond_chance() -> None:
    arms = {name: trials([0.5] * 10) for name in claims.POOLINGS}
    assert claims._poolings(arms, "here").holds is None
    assert claims._poolings(arms | {"MeanS": trials([0.9] * 10)}, "here").holds is True
    worse = claims._poolings(arms | {"MaxQ": trials([0.9] * 10)}, "here")
    assert worse.holds is False
    assert worse.reason == "MaxQ is better here."
