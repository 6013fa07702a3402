"""SentKVCompress's claims run on one prompt of each task, and count what they say they count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import random_llama

from kvlens.engine.engine import Engine
from kvlens.methods.sentkv import claims as sentkv
from kvlens.methods.sentkv.claims import ARMS, Seen


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


def test_verdicts_follow_the_figures() -> None:
    ours = seen([1.0] * 10)
    assert sentkv._reuse(ours).holds is True
    assert (
        sentkv._reuse([Seen(reused=[0.3, 0.5], reusable=[0.4, 0.6], similarity=[0.5, 0.4], moved=2, ideal=1)]).holds
        is False
    )
    assert sentkv._weight(ours).holds is True
    assert sentkv._against_full(ours, seen([1.0] * 10)).holds is True
    assert sentkv._against_full(seen([1.0] * 9 + [0.5]), ours).holds is None
    assert sentkv._against_full(seen([0.5] * 8 + [1.0] * 2), ours).holds is False
    names = list(ARMS)
    worse = {name: seen([0.5] * 8 + [1.0] * 2) for name in names[1:]}
    assert sentkv._ablation({names[0]: ours, **worse}).holds is True
    assert sentkv._ablation({names[0]: ours[:3], **{name: seen([0.5, 1.0, 1.0]) for name in names[1:]}}).holds is None
    assert sentkv._ablation({names[0]: ours, **worse, names[1]: ours}).holds is None, "10 prompts cannot exclude 22 %"
    many = seen([1.0] * 20)
    assert sentkv._ablation(dict.fromkeys(names, many)).holds is False


@pytest.mark.slow
def test_all_claims_are_judged_on_one_prompt_of_each_task(demo: Any) -> None:
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


def test_another_model_gets_an_answer_and_no_run() -> None:
    (only,) = sentkv.claims(Engine(random_llama()), 1, lambda _: None)
    assert only.holds is None
    assert "demo model's" in only.reason
