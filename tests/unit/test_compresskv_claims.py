"""When CompressKV's claims count as holding: the rules, on made-up figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvlens import tasks
from kvlens.lab.claims.methods import compresskv as claims
from kvlens.lab.claims.methods.compresskv_runs import (
    ARMS,
    BOTH,
    CONTROL,
    DECODE,
    HELD,
    NOTHING,
    TOY,
    Arm,
    Selected,
    Setting,
    answer_tokens,
    setting,
)
from kvlens.methods.compresskv.heads import HeadFigures
from kvlens.tasks import Asked
from kvlens.text.prompts import Prompt, PromptText


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
    found = claims._zero_layers(HeadFigures({"srh": srh, "trh": trh}, [0.5, 0.5], 0.04), TOY)
    assert found.holds is holds
    assert bool(found.reason) == (holds is not True)


def selected(level: dict[str, float], at: Setting) -> Selected:
    shape = (len(at.tasks), len(at.tokens), 10)
    score = {name: np.full(shape, level.get(name, 0.5)) for name in (*ARMS, HELD)}
    kept = {name: np.full(shape, 0.25) for name in score}
    return Selected(score, kept, np.ones((len(at.tasks), 10)), "paper")


def test_verdicts_of_the_arms() -> None:
    level = {"all heads": 0.3, "TRH": 0.3, HELD: 1.0}
    table2b, table3a, table3b = claims._selection(selected(level, TOY), TOY)
    assert table2b.holds is True
    assert table3a.holds is None, "layer budgets changed nothing"
    assert "SRH better than all heads; SRH + layers not told apart from SRH. Of the answer" in table3a.reason
    assert "SRH scores 1.000: what SRH loses is lost by the tokens chosen." in table3a.reason
    assert table3b.holds is True
    level |= {"6 SRH": 0.8, "SRH + layers": 0.7}
    _, table3a, table3b = claims._selection(selected(level, TOY), TOY)
    assert table3a.holds is True
    assert table3b.holds is False, "six heads are better than four"
    assert "6 SRH better than SRH; all heads worse than SRH" in table3b.reason
    assert "more is lost" in claims._selection(selected(level | {HELD: 0.6}, TOY), TOY)[2].reason


def test_heads_off_are_compared_where_the_lists_differ() -> None:
    at = replace(TOY, masked=(1, 2), masked_reading=(2,))
    order = {"srh": [(0, 0), (0, 1), (1, 0)], "trh": [(0, 0), (1, 0), (0, 1)], CONTROL: [(1, 0), (0, 1), (0, 0)]}
    off = {("srh", 2): 0.0, ("trh", 2): 1.0, ("srh", 1): 0.5, ("trh", 1): 0.5, (CONTROL, 2): 1.0}
    right: dict[Arm, list[float]] = {NOTHING: [1.0] * 10}
    right |= {(*arm, when): [value] * 10 for arm, value in off.items() for when in (DECODE, BOTH)}
    found = claims._masking(right, order, at)
    assert found.holds is True
    assert "2 of them while reading, too: SRH 1.00; TRH 0.00; the 2 heads of lowest SRH score off" in found.measured
    assert "different heads at [2] of these" in found.measured
    assert claims.why_masked(order, [2], "+1").endswith("The first 2: SRH L0H0, L0H1; TRH L0H0, L1H0.")
    found = claims._masking(right | {(CONTROL, 2, DECODE): [0.0] * 10}, order, at)
    assert found.holds is None
    assert "lowest scores hurts as much" in found.reason


def test_the_toy_is_asked_in_its_own_language_and_others_in_prose() -> None:
    toy, real = setting("demo", 48), setting("smollm2", 270)
    assert toy is TOY
    assert all(tasks.get(task).demo_language for task in (*toy.tasks, toy.masked_task))
    assert not any(tasks.get(task).demo_language for task in (*real.tasks, real.masked_task))
    assert real.masked == (3, 5, 8), "1, 2 and 3 % of the query heads, as in the paper"
    assert set(real.masked_reading) <= set(real.masked)
    for at, named in ((toy, "the demo model"), (real, "smollm2")):
        found = claims._selection(selected({}, at), at)
        assert all(f"on {named} at {at.length} tokens" in claim.measured for claim in found)
        layers = HeadFigures({"srh": [[0.09]], "trh": [[0.0]]}, [1.0], 0.04)
        assert f"Layers of {named} " in claims._zero_layers(layers, at).measured


def test_the_answer_is_found_in_its_fact_and_else_the_fact_is_taken() -> None:
    text = "The code of Ada is 41. Rain. The bell is iron."
    prompt = Prompt(PromptText(text), (0,) * len(text), tuple(text), tuple((at, at + 1) for at in range(len(text))))
    facts = ((0, 22), (29, 46))
    asked = Asked(text, " 41", facts, "t", None, None, 0, answers=("41",))
    assert answer_tokens(asked, prompt) == [19, 20, *range(29, 46)]
