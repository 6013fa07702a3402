"""When CompressKV's claims count as holding: the rules, on made-up figures."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.methods.compresskv import claims
from kvlens.methods.compresskv.heads import HeadFigures


def test_a_difference_counts_when_its_interval_leaves_out_zero() -> None:
    """Ten differences of mean 0.1: spread 0.1 (five 0, five 0.2) gives 1.96 * 0.1054 / sqrt 10 = 0.065; spread 0.5
    gives 0.327."""
    holds, words = claims.decide(np.array([0.0, 0.2] * 5))
    assert holds is True
    assert words == "+0.100 (95 % interval +0.035 to +0.165)"
    assert claims.decide(np.array([-0.4, 0.6] * 5))[0] is None
    assert claims.decide(-np.array([0.0, 0.2] * 5))[0] is False
    assert claims.decide(np.array([0.3]))[0] is None, "one prompt decides nothing"
    assert claims.decide(np.zeros(10))[0] is None


def test_heads_are_ranked_over_all_layers_with_ties_by_place() -> None:
    assert claims.ranked([[0.1, 0.9], [0.9, 0.0]]) == [(0, 1), (1, 0), (0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("trh", "srh", "holds"),
    [
        ([[0.0, 0.0], [1.0, 0.0]], [[0.09, 0.01], [4.0, 0.1]], True),
        ([[0.0, 0.0], [1.0, 0.0]], [[0.07, 0.01], [4.0, 0.1]], False),
        ([[0.1, 0.0], [1.0, 0.0]], [[0.5, 0.01], [4.0, 0.1]], None),
    ],
)
def test_a_layer_without_top_1_heads_retrieves_only_above_chance(
    trh: list[list[float]], srh: list[list[float]], holds: bool | None
) -> None:
    found = claims._zero_layers(HeadFigures({"srh": srh, "trh": trh}, [0.5, 0.5], 0.04))
    assert found.holds is holds
    assert bool(found.reason) == (holds is not True)


def test_verdicts_of_the_arms() -> None:
    shape = (len(claims.TASKS), len(claims.TOKENS), 10)
    level = {"all heads": 0.3, "TRH": 0.3, "SRH": 0.5, "SRH + layers": 0.5, "2 SRH": 0.5, "6 SRH": 0.5}
    table2b, table3a, table3b = claims._selection({name: np.full(shape, value) for name, value in level.items()}, 10)
    assert table2b.holds is True
    assert table3a.holds is None, "layer budgets changed nothing"
    assert table3b.holds is True
    level |= {"6 SRH": 0.8, "SRH + layers": 0.7}
    _, table3a, table3b = claims._selection({name: np.full(shape, value) for name, value in level.items()}, 10)
    assert table3a.holds is True
    assert table3b.holds is False, "six heads are better than four"
