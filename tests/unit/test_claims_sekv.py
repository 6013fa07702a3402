"""SeKV's claims run on one prompt, and count what they say they count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlens.engine.engine import Engine
from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods import sekv
from kvlens.lab.claims.methods.sekv_runs import Bench, Pair, Seen, asked_share
from kvlens.lab.claims.methods.sekv_setting import ENERGY, FACTORS, TOY, Setting, Whole, arms, setting_of
from kvlens.lab.claims.methods.sekv_tables import tables
from kvlens.lab.claims.methods.sekv_weights import even_rank, weights
from kvlens.lab.claims.methods.sekv_zoom import judged, thirds, top_quarter
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.statistics import sign_test
from kvlens.tasks import get


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (6, 0, 2 / 64), (3, 3, 1.0), (1, 8, 20 / 512)]
)
def test_the_sign_test(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p)


def test_a_verdict_needs_six_lopsided_prompts() -> None:
    right, wrong = Seen(right=True), Seen(right=False)
    assert Pair([right] * 5, [wrong] * 5).verdict is None
    assert Pair([right] * 6, [wrong] * 6).verdict is True
    assert Pair([wrong] * 6, [right] * 6).verdict is False
    assert Pair([right] * 20, [right] * 20).verdict is None


def test_the_top_quarter() -> None:
    assert top_quarter(np.array([[0.0, 0, 0, 1], [0, 0, 0, 1]])) == 1
    assert top_quarter(np.full((2, 4), 0.3)) == pytest.approx(0.25)
    assert top_quarter(np.zeros((2, 4))) == 0


@pytest.mark.slow
def test_all_claims_are_judged_on_one_prompt(demo: Any) -> None:
    said: list[str] = []
    found = sekv.claims(Engine(demo), 1, said.append)
    assert len(found) == 3 + 7 + 4 + 2
    assert said
    for claim in found:
        assert claim.method == "sekv"
        assert claim.source.startswith("SeKV ")
        assert claim.measured
        assert claim.holds is True or claim.reason, claim
    with_parts = next(claim for claim in found if "anchor tokens" in claim.says)
    assert with_parts.holds is None, "two prompts decide nothing"
    maps = found[0].figures
    assert np.array(maps["budget"]).shape == (6, 8)
    weights = found[-2].figures
    assert weights["bytes"] > 0
    assert found[-2].holds == (weights["bytes"] < weights["exact_bytes"])


def test_a_real_model_has_prose_and_the_papers_numbers_or_fit(demo: Any) -> None:
    assert setting_of("demo") is TOY
    assert TOY.preset == "demo"
    assert TOY.trained
    setting = setting_of("smollm2")
    assert not any(get(task).demo_language for task in setting.tasks)
    short = replace(setting, length=300, budget="90%")
    base = Bench(Engine(demo), short, 1, lambda _: None).base(setting.tasks[0], 300, "90%")
    assert base.preset in ("paper", "fit"), "never the toy's, whatever the model"
    assert base.params.router == "pca"
    assert base.params.zoom_rate == setting.whole["zoom_rate"]
    changed = [replace(base.params, **arm.switches) for arm in arms(setting, base, 0.5).values()]
    assert len(set(changed)) == len(changed), "no two arms are one"


def made_up(setting: Setting, whole: Whole, right: str = "") -> dict[str, list[Seen]]:
    """Runs of all arms, ten prompts each; those named in `right` answer all of them. Ranks, tokens and bytes are of
    factors that weigh 1.1 of exact, and 0.7 with less energy."""
    found = {}
    for name in arms(setting, whole, 0.5):
        bytes_ = 70 if name == ENERGY else 110
        found[name] = [
            Seen(
                right=name in right.split(", "),
                ranks=[np.array([18.0])],
                caps=[np.array([32.0])],
                tokens=[24],
                stored=bytes_,
                exact=100,
                raw=[True],
                moved=bytes_,
                moved_exact=100,
            )
            for _ in range(10)
        ]
    return found


REAL = setting_of("smollm2")
WHOLE = Whole("fit", SeKVParameters(**REAL.whole), 64)


def said(found: list[Claim], words: str) -> Claim:
    (one,) = (claim for claim in found if words in claim.says)
    return one


def test_the_tables_speak_of_the_model_and_leave_open_what_nothing_was_trained_for() -> None:
    found = tables(REAL, WHOLE, made_up(REAL, WHOLE, "SeKV, no anchors, no limit, best token"))
    for claim in found:
        assert "demo" not in claim.measured + claim.reason
        assert "smollm2" in claim.measured, claim
        assert claim.holds is True or claim.reason, claim
    assert said(found, "anchor tokens").holds is None
    assert said(found, "SVD reconstruction").holds is True
    assert "neither answers" in said(found, "a threshold per head").reason
    for words in ("without the trained zoom-in", "are worth most", "as the cap allows"):
        assert said(found, words).holds is None
        assert "shipped for smollm2" in said(found, words).reason
    assert said(found, "tighter cap").holds is None
    assert "head size 64" in said(found, "tighter cap").says


def test_factors_are_weighed_at_the_papers_proportion() -> None:
    assert even_rank(24, 64) == pytest.approx(24 * 64 / 89)
    assert WHOLE.quarter == 16
    assert Whole("paper", SeKVParameters(), 256).quarter == 32
    heavy = weights(REAL, WHOLE, made_up(REAL, WHOLE, "SeKV"))
    assert [claim.holds for claim in heavy] == [False, False]
    assert "below rank 17.3" in heavy[0].reason
    lighter = made_up(REAL, WHOLE, f"SeKV, {FACTORS}")
    lighter[FACTORS] = [replace(seen, stored=70, moved=70) for seen in lighter[FACTORS]]
    assert [(claim.holds, claim.reason) for claim in weights(REAL, WHOLE, lighter)] == [(True, ""), (True, "")]
    lighter[FACTORS] = [replace(seen, right=False) for seen in lighter[FACTORS]]
    assert "costs answers" in weights(REAL, WHOLE, lighter)[0].reason


def test_what_eq_12_asks_of_a_head() -> None:
    span, full = np.array([[[4, 9, 2, -1], [4, 9, 2, -1]]]), np.array([[[0.6, 0.3, 0.05, 0.5], [0.05, 0.04, 0.8, 0.1]]])
    mined, asked = asked_share(span, full, np.array([4, 9, 7, 8]))
    assert asked.tolist() == [[0.5, 0.5]], "two of four spans hold 0.9 of the mass on those in host memory"
    assert mined.tolist() == [[0.5, 0.0]], "the second head has a tenth of its attention on them"


def test_the_map_of_an_untrained_model_is_what_a_router_would_learn() -> None:
    rates = np.zeros((6, 4))
    rates[3, 0] = 0.2
    assert thirds(rates) == (0.0, pytest.approx(0.0125))
    maps = {name: [rates] * 10 for name in ("mined", "asked", "budget", "no limit")}
    sparse, focus, late = judged(REAL, maps)
    assert [claim.holds for claim in (sparse, focus, late)] == [True, True, True]
    assert "none is shipped for smollm2" in sparse.says
    maps["asked"] = [np.full((6, 4), 0.2)] * 10
    assert [claim.holds for claim in judged(REAL, maps)] == [None, None, None]
    assert "it depends on the positions" in judged(REAL, maps)[0].reason
