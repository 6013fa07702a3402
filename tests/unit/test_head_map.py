"""The needle scores of a map of heads: how they are measured, and what a map without them is good for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import raises_code, task_prompt

from kvlens import methods
from kvlens.lab.calibrate.copying import _Copying, answer_tokens, needle_scores
from kvlens.lab.studies.head_texts import NeedleIn, alike
from kvlens.methods.calibration import read_figures
from kvlens.methods.families.retrieval_heads import SHIPPED
from kvlens.shape import KVShape
from kvlens.tasks.texts import CALIBRATION, sentences

SHAPE = KVShape(layers=6, q_heads=8, kv_heads=2, head_dim=32, itemsize=4)


def test_the_mass_on_the_answer_and_the_output_against_float64() -> None:
    rng, n, m, d, answer = np.random.default_rng(5), 12, 3, 6, [4, 5, 7]
    q, new = rng.standard_normal((4, m, d)), rng.standard_normal((2, 2, m, d))
    old = rng.standard_normal((2, 1, 2, n, d))
    read: Any = SimpleNamespace(keys=torch.tensor(old[0]), values=torch.tensor(old[1]))
    copying = _Copying(read, torch.tensor(answer))
    copying.write(0, *torch.tensor(new))
    out = copying.attend(0, torch.tensor(q)[None], d**-0.5)[0]
    keys, values = (np.concatenate((a[0], b), 1) for a, b in zip(old, new, strict=True))
    for head in range(4):
        weights = np.exp(q[head] @ keys[head // 2].T / np.sqrt(d)) * np.tri(m, n + m, n)
        weights /= weights.sum(-1, keepdims=True)
        assert float(copying.mass[0][head]) == pytest.approx(weights[:, answer].sum(-1).mean(), rel=1e-5)
        np.testing.assert_allclose(out[head], weights @ values[head // 2], rtol=1e-4, atol=1e-6)


def test_the_answer_is_found_in_the_needle(demo: Any) -> None:
    prompt, made = task_prompt(demo, "needle", 256)
    found = answer_tokens(prompt, made.answer)
    said = "".join(prompt.source.text[slice(*prompt.offsets[i])] for i in found if prompt.offsets[i])
    assert made.answer.strip().rstrip(".") in said
    (start, end), *_ = prompt.source.needle
    assert all(start <= prompt.offsets[i][0] < end for i in found)


def test_the_demo_models_map_has_the_heads_that_look_at_an_answer(demo: Any) -> None:
    """Measured on one short prompt, the best heads are those of the map that is shipped."""
    found, told = needle_scores(demo, 1, 256)
    assert found.shape == (demo.shape.layers, demo.shape.q_heads)
    assert told["prompts"] == 1
    assert ((found >= 0) & (found <= 1)).all()
    shipped = torch.tensor(json.loads((SHIPPED / "heads_demo.json").read_text())["needle"])
    best = {int(x) for x in shipped.flatten().topk(5).indices}
    assert {int(x) for x in found.flatten().topk(3).indices} <= best


def test_maps_of_two_texts_are_compared_by_ranks_and_by_their_best() -> None:
    scores = np.arange(40.0)
    assert alike(scores, scores * 2) == {"rank": pytest.approx(1.0), "best5": 5, "best10": 10, "best20": 20}
    assert alike(scores, -scores) == {"rank": pytest.approx(-1.0), "best5": 0, "best10": 0, "best20": 0}
    assert alike(scores, np.roll(scores, 3))["best10"] == 7
    asked = NeedleIn(CALIBRATION).make(200, 0.5, 7, lambda text: list(range(len(text.split()))))
    assert any(sentence in asked.text for sentence in sentences(CALIBRATION))
    assert not any(sentence in asked.text for sentence in sentences() if len(sentence) > 20)


@pytest.fixture
def old(tmp_path: Path) -> str:
    """A map made without needle prompts."""
    figures = json.loads((SHIPPED / "heads_demo.json").read_text())
    del figures["needle"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(figures))
    return str(path)


@pytest.mark.parametrize(
    ("name", "asks", "otherwise"),
    [
        ("headkv", {"score": "needle"}, {"score": "induction"}),
        ("sekv", {"whole_share": 0.5}, {"whole_share": 0.5, "whole_by": "induction"}),
    ],
)
def test_a_map_without_needle_scores_is_refused_where_they_are_asked_for(
    old: str, name: str, asks: dict[str, Any], otherwise: dict[str, Any]
) -> None:
    method = methods.get(name)
    needing, content = (method.Parameters(calibration=old, **values) for values in (asks, otherwise))
    with raises_code("needle_scores_missing"):
        read_figures(method, needing, SHAPE, "demo")
    assert read_figures(method, content, SHAPE, "demo")["retrieval heads"].needle is None
    shipped = read_figures(method, method.Parameters(**asks), SHAPE, "demo")["retrieval heads"]
    assert len(shipped.needle) == SHAPE.layers


def test_headkv_divides_by_the_scores_that_are_asked_for(demo: Any) -> None:
    from kvlens.methods.families.retrieval_heads import HeadMap

    method = methods.get("headkv")
    found = HeadMap([[0.0] * 8] * 6, [[1.0] * 8] * 6, [[0.0, 2.0] * 4] * 6)
    for score, expected in (("induction", [1.0] * 12), ("needle", [2.0] * 12)):
        made: Any = SimpleNamespace(
            context=SimpleNamespace(calibration={"retrieval heads": found}, shape=SHAPE),
            params=method.Parameters(score=score),
        )
        assert method._scores(made) == expected
