"""FreeKV's claims: the verdicts follow the figures, and the sentences name the model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlens import tasks
from kvlens.engine.engine import Engine
from kvlens.lab.bench.trials import Prompts
from kvlens.lab.claims import written
from kvlens.lab.claims.methods import freekv as claims
from kvlens.lab.claims.methods import freekv_runs as claims_runs
from kvlens.lab.claims.methods import freekv_similarity as similarity
from kvlens.lab.claims.methods.freekv_cases import TOY, Case, case_of
from kvlens.lab.claims.methods.freekv_runs import Seen

CASE = case_of("some-llama")


def trials(rights: list[float], corrected: float = 0.0) -> list[Seen]:
    return [Seen(right=right, corrected=[corrected], moved=10.0, blocking=10 * corrected) for right in rights]


def test_the_toy_is_asked_in_its_language_and_another_model_of_real_prose() -> None:
    assert case_of("demo") is TOY
    assert all(tasks.get(name).demo_language for name in TOY.tasks)
    assert not any(tasks.get(name).demo_language for name in CASE.tasks)
    assert set(CASE.pooled) < set(CASE.tasks)
    assert {*claims_runs.COMPARED, 0.8} <= {*CASE.taus} < {*TOY.taus}
    assert {arm.budget for arm in claims_runs.arms(CASE).values()} == {"20%", "40%"}
    assert {arm.budget for arm in claims_runs.arms(TOY).values()} == {"20%"}


def test_sentences_name_the_model_and_what_is_fed() -> None:
    assert CASE.about(3).startswith("some-llama, 3 prompts of each of niah_single")
    assert "full KV's own words fed" in CASE.about(3)
    assert "the demo model, 3 prompts" in TOY.about(3)
    assert "the right answer fed" in TOY.about(3)
    low = np.full((5, 2, 4), 0.5)
    assert "demo model" not in similarity.every_head(CASE, low, "here").reason
    assert "demo model" in similarity.every_head(TOY, low, "here").reason
    many = {tau: trials([1.0] * 2, rate) for tau, rate in zip(CASE.taus, (0.0, 0.9, 0.95, 1.0), strict=True)}
    assert "of some-llama have a mean cosine below tau" in claims.rates(CASE, many, "here")[1].reason


def test_one_prompt_bounds_nothing_and_is_written_as_json() -> None:
    one = {tau: trials([1.0], rate) for tau, rate in zip(CASE.taus, (0.0, 0.1, 0.3, 1.0), strict=True)}
    claim = claims.rates(CASE, one, "here")[1]
    assert claim.holds is None
    assert written(claim)["figures"]["interval"]["0.8"] == [None, None]
    json.dumps(written(claim), allow_nan=False)


def test_own_words_end_where_they_are_the_right_answer(demo: Any) -> None:
    engine = Engine(demo)
    case = Case("it", ("needle",), (), 300, 0, own_words=8)
    source, prompt, read = Prompts(engine)("needle", case.length, 0)
    said, answers = claims_runs.to_feed(engine, case, source, prompt, read)
    assert answers, "full KV answers a needle"
    assert demo.tokenizer.decode(said).strip() == source.answer.strip()
    other = replace(source, answer=" 0", answers=("0",))
    more, answers = claims_runs.to_feed(engine, case, other, prompt, read)
    assert not answers
    assert more[: len(said)] == said
    assert claims_runs.to_feed(engine, replace(case, own_words=2), source, prompt, read) == (said[:2], False)
    key = tuple(demo.tokenizer.encode(source.answer, add_special_tokens=False))
    assert claims_runs.to_feed(engine, replace(case, own_words=0), source, prompt, read) == (key, True)


def test_similarity_is_high_only_if_every_head_is() -> None:
    cosine = np.full((5, 2, 4), 0.9)
    cosine[:, 0] = 0.85
    assert similarity.every_head(CASE, cosine, "here").holds is True
    assert similarity.first_layer([cosine, cosine], "here").holds is True
    cosine[:, 1, 2] = 0.75
    high = similarity.every_head(CASE, cosine, "here")
    assert high.holds is False
    assert "lowest 0.750 (layer 1, query head 2)" in high.measured
    assert "88% of 8 heads" in high.measured
    assert high.reason == "1 of 8 heads do not: 1 in layer 1."


@pytest.mark.parametrize(
    ("means", "holds"), [([0.88, 0.89, 0.9], True), ([0.4, 0.41, 0.42], False), ([0.9, 0.95, 0.9], None)]
)
def test_the_mean_is_compared_with_table_8_by_its_interval(means: list[float], holds: bool | None) -> None:
    cosines = [np.full((4, 3, 2), mean) for mean in means]
    claim = similarity.mean_of_model(cosines, "here")
    assert claim.holds is holds
    assert holds is not False or "below all" in claim.reason
    first = [np.concatenate([np.full((4, 1, 2), 0.1), one[:, 1:]], 1) for one in cosines]
    assert similarity.mean_of_model(first, "here").figures == claim.figures, "the first layer is left out"


def test_a_first_layer_that_is_lower_in_some_prompts_alone_decides_nothing() -> None:
    high, low = np.full((4, 2, 2), 0.9), np.full((4, 2, 2), 0.9)
    high[:, 0], low[:, 0] = 0.95, 0.85
    assert similarity.first_layer([high, low], "here").holds is None
    above = similarity.first_layer([high, high], "here")
    assert above.holds is False
    assert above.reason == "The lowest layers are 1 (0.90), 0 (0.95)."


def test_max_pooling_never_corrects_more() -> None:
    cosine = np.random.default_rng(0).uniform(0.5, 1, (40, 3, 8))
    claim = similarity.max_pooling(cosine, 4, "here")
    assert claim.holds is False
    assert claim.figures["max"] < claim.figures["mean"] < claim.figures["min"]


def test_steps_below_tau_in_some_heads_only() -> None:
    cosine = np.full((4, 1, 4), 0.9)
    cosine[:3, 0, :2] = 0.1
    assert similarity.head_specific(cosine, 2, "here").figures == {"share_of_steps_some_not_all": 0.75}
    cosine[:] = 0.1
    assert similarity.head_specific(cosine, 2, "here").holds is False


def test_correction_rates_rise_and_are_compared_with_the_table() -> None:
    rates = {0.0: 0.0, 0.7: 0.05, 0.8: 0.1, 0.9: 0.3, 1.0: 1.0}
    rising, few = claims.rates(CASE, {tau: trials([1.0] * 2, rate) for tau, rate in rates.items()}, "here")
    assert (rising.holds, few.holds) == (True, True)
    more = {tau: trials([1.0] * 2, rate) for tau, rate in (rates | {0.8: 0.6}).items()}
    rising, few = claims.rates(CASE, more, "here")
    assert (rising.holds, few.holds) == (False, False)
    apart = {tau: trials([1.0] * 2, rate) for tau, rate in rates.items()}
    apart[0.8] = trials([1.0], 0.1) + trials([1.0], 0.3)
    assert claims.rates(CASE, apart, "here")[1].holds is None


@pytest.mark.parametrize(("without", "holds"), [([0.1] * 10, True), ([0.9] * 10, None), ([1.0] * 10, False)])
def test_what_correction_buys(without: list[float], holds: bool | None) -> None:
    arms = {tau: trials([0.9] * 10) for tau in CASE.taus}
    assert claims.accuracy(CASE, arms | {0.0: trials(without)}, "20%", "here").holds is holds


def test_correction_that_stays_behind_no_speculation_does_not_hold() -> None:
    arms = {tau: trials([0.9] * 10) for tau in CASE.taus} | {0.0: trials([0.1] * 10), 1.0: trials([1.0] * 10)}
    claim = claims.accuracy(CASE, arms, "40%", "here")
    assert claim.holds is False
    assert claim.reason.startswith("0.9 answers worse than no speculation. No speculation at all")
    assert "40% of full KV" in claim.says
    assert "budget 40%" in claim.measured


def test_what_full_kv_does_not_answer_is_left_out_of_accuracy() -> None:
    arms = {tau: [*trials([0.9] * 10), Seen(right=0.0, answers=False, corrected=[0.0])] for tau in CASE.taus}
    assert claims.accuracy(CASE, arms, "20%", "here").figures["n"] == 10
    none = {tau: [Seen(answers=False)] for tau in CASE.taus}
    claim = claims.accuracy(CASE, none, "20%", "here")
    assert claim.holds is None
    assert "some-llama answers none" in claim.reason


def test_the_best_pooling_is_named_only_beyond_chance() -> None:
    arms = {name: trials([0.5] * 10) for name in claims.POOLINGS}
    assert claims.poolings(arms, "here").holds is None
    assert claims.poolings(arms | {"MeanS": trials([0.9] * 10)}, "here").holds is True
    worse = claims.poolings(arms | {"MaxQ": trials([0.9] * 10)}, "here")
    assert worse.holds is False
    assert worse.reason == "MaxQ is better here."
