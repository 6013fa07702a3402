"""SeKV's claims run on one prompt, and count what they say they count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import random_llama

from kvlens.bench.intervals import sign_test
from kvlens.engine.engine import Engine
from kvlens.methods.sekv import claims as sekv
from kvlens.methods.sekv.claims_runs import Pair, Seen


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
    assert sekv._top_quarter(np.array([[0.0, 0, 0, 1], [0, 0, 0, 1]])) == 1
    assert sekv._top_quarter(np.full((2, 4), 0.3)) == pytest.approx(0.25)
    assert sekv._top_quarter(np.zeros((2, 4))) == 0


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


def test_another_model_gets_an_answer_and_no_run() -> None:
    (only,) = sekv.claims(Engine(random_llama()), 1, lambda _: None)
    assert only.holds is None
    assert "demo model's" in only.reason
