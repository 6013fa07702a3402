"""SentKVCompress's claims run on one prompt of each task, and count what they say they count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlens import tasks
from kvlens.engine.engine import Engine
from kvlens.lab.claims.methods import sentkv
from kvlens.lab.claims.methods.sentkv_cases import ABLATIONS, CAUSES, TOY, case_of
from kvlens.lab.claims.methods.sentkv_runs import FULL, Seen

CASE = case_of("some-llama")


def seen(right: list[float]) -> list[Seen]:
    return [
        Seen(
            right=x,
            reused=[0.65, 0.75],
            reusable=[0.7, 0.9],
            similarity=[0.5, 0.9],
            moved=120,
            ideal=100,
            extremes=(7, 100),
        )
        for x in right
    ]


def test_the_toy_is_asked_in_its_language_and_another_model_of_real_prose() -> None:
    assert case_of("demo") is TOY
    assert all(tasks.get(name).demo_language for name in TOY.tasks)
    assert not any(tasks.get(name).demo_language for name in CASE.tasks)
    assert TOY.feeds_key
    assert not CASE.feeds_key
    assert TOY.arms("multikey") == ABLATIONS
    assert set(CASE.arms("niah_multikey")) == {*ABLATIONS, *CAUSES}
    assert CASE.arms("niah_identifier") == ABLATIONS


def test_sentences_name_the_model_and_how_answers_are_counted() -> None:
    ours, half = seen([1.0] * 4), seen([1.0, 1.0, 1.0, 0.5])
    arms = {FULL: ours, **dict.fromkeys(ABLATIONS, half)}
    for case, name, counted in (
        (CASE, "some-llama", "each decodes by itself"),
        (TOY, "the demo model", "fed token by"),
    ):
        found = [sentkv.reuse(case, ours), sentkv.ablation(case, arms), sentkv.weight(case, ours)]
        for claim in (*found, sentkv.against_full(case, arms)):
            assert f"{name}, n = 4 prompts" in claim.measured
            assert counted in claim.measured
    assert "demo" not in sentkv.ablation(CASE, arms).reason
    assert "demo language" in sentkv.ablation(TOY, arms).reason


def test_what_the_causes_answer_is_said_on_their_prompts() -> None:
    ours = [Seen(right=0.0, task="niah_multikey"), Seen(right=1.0, task="niah_identifier")]
    full = [Seen(right=1.0, task=point.task) for point in ours]
    arms = {FULL: full, **dict.fromkeys(ABLATIONS, ours), **dict.fromkeys(CAUSES, full[:1])}
    claim = sentkv.against_full(CASE, arms)
    told = "full KV 1.00, usage 0.1 0.00, every token ranked by its own key 1.00, usage 0.2 1.00"
    assert told in claim.measured
    assert sentkv.against_full(TOY, {name: arms[name] for name in (FULL, *ABLATIONS)}).figures.get("causes") is None


def test_verdicts_follow_the_figures() -> None:
    ours = seen([1.0] * 10)
    assert sentkv.reuse(CASE, ours).holds is True
    few = [Seen(reused=[0.3, 0.5], reusable=[0.4, 0.6], similarity=[0.5, 0.4], moved=2, ideal=1)] * 2
    assert sentkv.reuse(CASE, few).holds is False
    apart = [
        Seen(reused=[x, x + 0.1], reusable=[0.9, 0.8], similarity=[0.5, 0.4], moved=2, ideal=1) for x in (0.4, 0.8)
    ]
    assert sentkv.reuse(CASE, apart).holds is None
    assert sentkv.weight(CASE, ours).holds is True
    names = list(ABLATIONS)

    def against(mine: list[Seen], full: list[Seen]) -> bool | None:
        return sentkv.against_full(CASE, {FULL: full, names[0]: mine}).holds

    assert against(ours, seen([1.0] * 10)) is True
    assert against(seen([1.0] * 9 + [0.5]), ours) is None
    assert against(seen([0.5] * 8 + [1.0] * 2), ours) is False
    worse = {name: seen([0.5] * 8 + [1.0] * 2) for name in names[1:]}

    def ablation(arms: dict[str, list[Seen]]) -> bool | None:
        return sentkv.ablation(CASE, arms).holds

    assert ablation({names[0]: ours, **worse}) is True
    assert ablation({names[0]: ours[:3], **{name: seen([0.5, 1.0, 1.0]) for name in names[1:]}}) is None
    assert ablation({names[0]: ours, **worse, names[1]: ours}) is None, "10 prompts cannot exclude 22 %"
    assert ablation(dict.fromkeys(names, seen([1.0] * 20))) is False


@pytest.mark.slow
def test_all_claims_are_judged_on_one_prompt_of_each_task(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentkv, "case_of", lambda model: replace(TOY, length=512))
    said: list[str] = []
    found = sentkv.claims(Engine(demo), 1, said.append)
    assert len(found) == 4
    assert said
    for claim in found:
        assert claim.method == "sentkv"
        assert claim.measured
        assert claim.holds is True or claim.reason, claim
    reuse = found[0].figures
    assert 0 < reuse["reused"] < reuse["reusable"] < 1
    assert reuse["moved_bytes"] > reuse["ideal_bytes"] > 0
    assert np.isclose(found[2].figures["mean"], 1 / 11.7, rtol=0.1), "one token's KV per chunk of about 11.7 tokens"
