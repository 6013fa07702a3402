"""CHESS's claims: what is measured on which model, the verdicts, and sentences that follow the figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvlens import tasks
from kvlens.lab.claims.methods import chess as claims
from kvlens.lab.claims.methods import chess_verdicts as claims_verdicts
from kvlens.lab.claims.methods.chess_cases import EXCERPT, KEEP, TOY, Case, setting
from kvlens.lab.claims.methods.chess_runs import TRIGGERS, Arms, Measured, Point, needed
from kvlens.text.prompts import Prompt, PromptText

CALIBRATED = {"entropy_nats": 3.3, "varentropy_page_nats2": 3.4, "above_both": 1, "pages": 890}


def arms(nats: dict[tuple[float, str], float], judged: int = 4, uncertain: int = 0) -> Arms:
    """Five answers per arm that scatter by a few hundredths of a nat; 1 nat where nothing is said."""

    def answers(keep: float, trigger: str) -> list[Point]:
        spread = 0.005 if trigger == "dynamic" else 0.01
        value = nats.get((keep, trigger), 1.0)
        return [Point(value + spread * i, 0.5, 1, uncertain, judged, ((2.5, 4.0),) * judged) for i in range(5)]

    return {(keep, trigger): answers(keep, trigger) for keep in KEEP for trigger in TRIGGERS}


def measured(found: Arms, model: str = "demo", **given: Any) -> Measured:
    """As if these arms had been run on both kinds of answers."""
    at = replace(setting(model), keep=KEEP, keep_long=KEEP)
    return Measured(at, asked=found, long=found, presets={"fit"}, **given)


def test_the_toy_is_asked_in_its_own_language_and_others_in_prose() -> None:
    toy, real = setting("demo"), setting("smollm2")
    assert toy is TOY
    assert all(tasks.get(source.task).demo_language and source.keyed for source in toy.sources)
    keyed = [source.task for source in real.sources if source.keyed]
    assert keyed
    assert not any(tasks.get(task).demo_language for task in keyed)
    assert [source.task for source in real.sources if source.long] == [EXCERPT]
    assert set(real.own_words) <= set(real.keep_long)


def test_verdicts_of_the_claims() -> None:
    better = arms({(keep, "dynamic"): 0.5 for keep in KEEP})
    assert claims._dynamic(measured(better)).holds is True
    assert claims._dynamic(measured(arms({(KEEP[0], "dynamic"): 2.0}))).holds is False
    mixed = better | {(KEEP[0], "dynamic"): [Point(1.0 + 0.1 * (-1) ** i, 0.5, 1, 0, 4) for i in range(5)]}
    assert claims._dynamic(measured(mixed)).holds is None
    phases = dict(zip([(keep, "dynamic") for keep in KEEP], (1.0, 2.0, 1.0, 0.5, 0.5), strict=True))
    assert claims._phases(measured(arms(phases))).holds is True
    worst_first = dict(zip(phases, (3.0, 2.0, 1.0, 0.5, 0.2), strict=True))
    assert claims._phases(measured(arms(worst_first))).holds is False
    full = [Point(0.1 + 0.005 * i, 1.0, 0, 0, 0) for i in range(5)]
    assert claims._smallest(measured(arms({}), full=full, held=full)).holds is False
    assert claims._smallest(measured(arms({(KEEP[0], "dynamic"): 0.05}), full=full, held=full)).holds is True


def test_what_the_facts_bring_back_is_said_as_it_was_found() -> None:
    right = [Point(0.1 + 0.005 * i, 1.0, 0, 0, 0) for i in range(5)]
    wrong = [replace(point, right=0.5) for point in right]
    found = claims._smallest(measured(arms({}), full=right, held=right))
    assert "1.00 are exact: the selection does not find these pages" in found.reason
    found = claims._smallest(measured(arms({}), full=right, held=wrong))
    assert "0.00 are exact: more is lost than these pages" in found.reason


@pytest.mark.parametrize(
    ("uncertain", "said"),
    [(4, "What makes it fire is that pruning"), (0, "are 0 and 20 of 20 at 5%;"), (0, "Here no page triggers. Above")],
)
def test_why_it_triggers_too_often_or_too_rarely(uncertain: int, said: str) -> None:
    found = claims._rate(measured(arms({}, uncertain=uncertain), "smollm2"), CALIBRATED)
    assert found.holds is (False if uncertain else None), "of 20 pages without a trigger every 20th may have had one"
    assert said in found.reason
    assert claims._rate(measured(arms({}, judged=20, uncertain=2)), CALIBRATED).holds is True


def test_sentences_name_the_model_and_what_was_fed() -> None:
    row = {"rank": 0.2, "kept": 0.9, "flat": 0.8, "spent": 0.25}
    ranks = {keep: [{**row, "chance": keep}] * 3 for keep in KEEP}
    more = {"full": [Point(0.1, 1.0, 0, 0, 0)] * 5, "held": [Point(0.1, 1.0, 0, 0, 0)] * 5, "ranks": ranks}
    for model, named, fed in (
        ("demo", "the demo model, 2048 tokens, preset fit", "of the right answer that dynamic"),
        ("smollm2", "smollm2, 1024 tokens, preset fit", "of full KV's own answer that dynamic"),
    ):
        found = measured(arms({}), model, parts=([0.8] * 3, [0.4] * 3), **more)
        said = [
            claims._dynamic(found),
            claims._phases(found),
            claims._smallest(found),
            claims._rate(found, CALIBRATED),
            claims._affinity(found),
        ]
        assert all(named in claim.measured for claim in said)
        assert fed in said[0].measured
        assert said[-1].holds is True
        assert "mean rank 0.20" in said[-1].measured


def test_pages_that_are_attended_anyway_have_no_rank() -> None:
    """Eight pages of one token: a sink, five to choose from, a window of two. All are candidates; the selection takes
    the window's two and page 2."""
    offsets = tuple((at, at + 1) for at in range(8))
    prompt = Prompt(PromptText("abcdefgh"), tuple(range(8)), tuple("abcdefgh"), offsets)
    first = {
        "page_score": torch.tensor([0.0, 1.0, 5.0, 2.0, 3.0, 4.0, 9.0, 8.0]),
        "page_kept": torch.tensor([0.0, 0, 1, 0, 0, 0, 1, 1]),
        "safe_pages": torch.tensor([1, 6, 8]),
    }
    case = Case(prompt, SimpleNamespace(), (0,), ((3, 4), (7, 8)))  # type: ignore[arg-type]
    (row,) = needed(case, first, 1)
    assert row["rank"] == pytest.approx(3 / 4), "page 3 is fourth of pages 1 to 5; page 7 is the window's"
    assert (row["kept"], row["flat"]) == (0.0, 0.0)
    assert np.allclose((row["chance"], row["spent"]), (3 / 8, 2 / 3))
    assert needed(replace(case, needle=((0, 1), (6, 7))), first, 1) == []


def test_what_is_not_shown_is_undecided() -> None:
    assert claims_verdicts.phases([(0.1, 0.05, 0.15), (-0.1, -0.2, -0.05)]) is True
    assert claims_verdicts.phases([(0.1, 0.05, 0.15), (-0.1, -0.2, 0.05)]) is False, "it is not shown to recover"
    assert claims_verdicts.phases([(-0.1, -0.2, 0.05), (-0.1, -0.2, -0.05)]) is None
    assert claims_verdicts.phases([(-0.1, -0.2, -0.05)]) is False
    assert claims_verdicts.about_every_ten([(10, 100), (20, 200)]) is True
    assert claims_verdicts.about_every_ten([(10, 100), (6, 120), (3, 109)]) is None
    assert claims_verdicts.about_every_ten([(10, 100), (1, 890)]) is False
    assert claims_verdicts.found_worse((0.36, 0.24, 0.48), [(0.0, 0.05), (0.6, 0.35)], 20) is None
    assert claims_verdicts.found_worse((0.36, 0.24, 0.48), [(0.05, 0.6)], 20) is False
    assert claims_verdicts.found_worse((0.68, 0.62, 0.74), [(0.2, 0.1)], 20) is False
