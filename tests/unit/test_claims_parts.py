"""The claims that no comparison of arms can state: verdicts follow made-up figures, and the toy runs each part once."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from kvlens import PACKAGE, tasks
from kvlens.engine.engine import Engine
from kvlens.lab.claims import Claim, setting_of, written
from kvlens.lab.claims.check import claiming, statements_of
from kvlens.lab.claims.family import decide
from kvlens.lab.claims.methods import chess, compresskv, freekv, sekv_gates, sentkv
from kvlens.lab.claims.methods.chess_pages import rank_asked
from kvlens.lab.claims.page import document
from kvlens.methods import get
from kvlens.methods.compresskv.heads import HeadFigures
from kvlens.statistics import sign_test
from kvlens.text.prompts import Prompt, PromptText

REAL = setting_of("smollm2")


def alone(claim: Claim) -> Claim:
    """The claim of a paper that states nothing else."""
    return decide([claim])[0]


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (6, 0, 2 / 64), (3, 3, 1.0), (1, 8, 20 / 512)]
)
def test_the_sign_test(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p)


def test_the_toy_answers_its_own_language_and_other_models_prose() -> None:
    assert all(tasks.get(name).demo_language for name in setting_of("demo").tasks)
    assert not any(tasks.get(name).demo_language for name in REAL.tasks)
    assert REAL.about(3).startswith("smollm2, 3 ")
    assert all(name in REAL.about(3) for name in REAL.tasks)


@pytest.mark.parametrize("name", ["sekv", "chess", "freekv", "sentkv", "compresskv"])
def test_a_part_states_arms_and_measures_the_rest(name: str) -> None:
    assert statements_of(get(name))
    assert name in claiming("demo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("sekv", 4), ("chess", 1), ("freekv", 4), ("sentkv", 1), ("compresskv", 2)]
)
def test_one_prompt_of_each_task_is_measured_and_decides_little(demo: Any, name: str, count: int) -> None:
    lines: list[str] = []
    module = importlib.import_module(f"kvlens.lab.claims.methods.{name}")
    claims = decide(module.claims(Engine(demo), 1, lines.append))
    assert len(claims) == count
    assert lines
    for claim in claims:
        assert claim.method == name
        assert "demo" in claim.measured
        assert claim.holds is True or claim.reason, claim
        json.dumps(written(claim), allow_nan=False)
    if name == "sentkv":
        assert claims[0].figures["mean"] == pytest.approx(1 / 11.7, rel=0.1), "a chunk of 11.7 tokens weighs one token"
    if name == "sekv":
        assert np.array(claims[0].figures["10%"]).shape == (6, 8)


def test_heads_rank_over_all_layers_with_ties_by_place() -> None:
    assert compresskv.ranked([[0.1, 0.9], [0.9, 0.0]]) == [(0, 1), (1, 0), (0, 0), (1, 1)]


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
    claim = compresskv.zero_layers(HeadFigures({"srh": srh, "trh": trh}, [0.5, 0.5], 0.04), "demo")
    assert claim.holds is holds
    assert bool(claim.reason) == (holds is not True)


def masked(srh: float, trh: float, control: float, n: int = 10) -> compresskv.Scores:
    scores: compresskv.Scores = {compresskv.NOTHING: [1.0] * n, ("srh", 1): [0.5] * n, ("trh", 1): [0.5] * n}
    return scores | {("srh", 2): [srh] * n, ("trh", 2): [trh] * n, (compresskv.CONTROL, 2): [control] * n}


ORDERS = {"srh": [(0, 0), (0, 1)], "trh": [(0, 0), (1, 0)], compresskv.CONTROL: [(1, 0), (0, 1)]}


@pytest.mark.parametrize(
    ("scores", "holds"),
    [
        (masked(0.0, 1.0, 1.0), True),
        (masked(0.5, 0.0, 1.0), False),
        (masked(0.5, 0.5, 1.0), None),
        (masked(0.0, 1.0, 0.0), None),
        (masked(0.0, 1.0, 1.0, n=9), None),
    ],
)
def test_masked_heads_are_compared_where_the_lists_differ(scores: compresskv.Scores, holds: bool | None) -> None:
    claim = alone(compresskv.masking(scores, ORDERS, [1, 2], REAL))
    assert claim.holds is holds
    gap = np.mean(scores["trh", 2]) - np.mean(scores["srh", 2])
    assert claim.figures["gap"][0] == pytest.approx(gap), "the lists of one head are alike and tell nothing"


@pytest.mark.parametrize(("share", "holds"), [(0.066, True), (0.0749, True), (0.086, False)])
def test_the_extremes_weigh_seven_percent(share: float, holds: bool) -> None:
    assert sentkv.weight(REAL, [share] * 3, 1).holds is holds


def test_similarity_is_high_only_if_every_head_is() -> None:
    cosine = np.full((5, 2, 4), 0.9)
    cosine[:, 0] = 0.85
    assert freekv.every_head(cosine, "here").holds is True
    assert alone(freekv.first_layer([cosine + noise for noise in np.arange(10) / 100], "here")).holds is True
    cosine[:, 1, 2] = 0.75
    claim = freekv.every_head(cosine, "here")
    assert claim.holds is False
    assert "lowest 0.750 (layer 1, query head 2)" in claim.measured
    assert claim.reason.startswith("1 of 8 heads")


@pytest.mark.parametrize(("mean", "spread", "holds"), [(0.88, 0.01, True), (0.4, 0.01, False), (0.9, 0.2, None)])
def test_the_mean_is_compared_with_table_8_by_its_interval(mean: float, spread: float, holds: bool | None) -> None:
    cosines = [np.full((4, 3, 2), mean + spread * (-1) ** index) for index in range(10)]
    claim = alone(freekv.mean_of_model(cosines, "here"))
    assert claim.holds is holds
    lower = [np.concatenate([np.full((4, 1, 2), 0.1), steps[:, 1:]], 1) for steps in cosines]
    assert freekv.mean_of_model(lower, "here").figures == claim.figures, "the first layer is left out"
    assert alone(freekv.mean_of_model(cosines[:9], "here")).holds is None, "nine prompts decide nothing"


def test_steps_below_tau_in_some_heads_only() -> None:
    cosine = np.full((4, 1, 4), 0.9)
    cosine[:3, 0, :2] = 0.1
    assert freekv.head_specific(cosine, 2, "here").figures == {"share_of_steps_some_not_all": 0.75}
    cosine[:] = 0.1
    assert freekv.head_specific(cosine, 2, "here").holds is False


@pytest.mark.parametrize(("uncertain", "pages", "holds"), [(100, 1000, True), (6, 100, None), (1, 890, False)])
def test_a_rate_is_decided_by_its_interval(uncertain: int, pages: int, holds: bool | None) -> None:
    claim = alone(chess.rate(uncertain, pages, 10, "smollm2"))
    assert claim.holds is holds
    assert f"{uncertain} of {pages} pages" in claim.measured


@pytest.mark.parametrize(("uncertain", "more"), [(8, 500), (12, 100), (1, None)])
def test_a_rate_states_how_many_pages_would_decide_it(uncertain: int, more: int | None) -> None:
    test = chess.rate(uncertain, 100, 10, "smollm2").test
    assert test is not None
    assert test.needs is None if more is None else test.needs is not None and test.needs > more


@pytest.mark.parametrize(
    ("rank", "kept", "n", "holds"),
    [
        (0.2, 0.9, 10, True),
        (0.7, 0.3, 10, False),
        (0.4, 0.3, 10, None),
        (0.4, 0.0, 20, False),
        (0.4, 0.0, 10, None),
        (0.4, 0.2, 10, None),
        (0.2, 0.9, 9, None),
    ],
)
def test_asked_pages_must_rank_and_be_kept_better_than_chance(
    rank: float, kept: float, n: int, holds: bool | None
) -> None:
    row = {"kept": kept, "flat": 0.8, "chance": 0.3, "spent": 0.25}
    rows = [row | {"rank": rank + index / 1000} for index in range(n)]
    claim = alone(chess.rank(REAL, dict.fromkeys(chess.KEEP, rows), (rows, rows)))
    assert claim.holds is holds
    assert claim.figures["kept"]["0.1"]["flat"] == pytest.approx(0.8)


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
    (row,) = rank_asked(prompt, ((3, 4), (7, 8)), first, 1)
    assert row["rank"] == pytest.approx(3 / 4), "page 3 is fourth of pages 1 to 5; page 7 is the window's"
    assert (row["kept"], row["flat"]) == (0.0, 0.0)
    assert np.allclose((row["chance"], row["spent"]), (3 / 8, 2 / 3))
    assert rank_asked(prompt, ((0, 1), (6, 7)), first, 1) == []


def gates(zoom: np.ndarray, rank: float) -> list[sekv_gates.Watch]:
    sink = sekv_gates.Watch(16)
    sink.zoom, sink.ranks, sink.caps = [zoom], [np.array([rank])], [np.array([16.0])]
    return [sink]


def test_zoom_maps_are_judged_at_every_budget() -> None:
    late = np.zeros((6, 4))
    late[3, 0] = 0.2
    even = np.full((6, 4), 0.2)
    assert [claim.holds for claim in sekv_gates.judge(dict.fromkeys(("10%", ""), gates(late, 3)), 1, "demo")] == [
        True
    ] * 4
    assert [claim.holds for claim in sekv_gates.judge({"10%": gates(late, 3), "": gates(even, 16)}, 1, "demo")] == [
        False
    ] * 4
    undecided = sekv_gates.undecided("smollm2")
    assert [claim.holds for claim in undecided] == [None] * 4
    assert all("smollm2" in claim.reason for claim in undecided)


def test_figures_of_a_map() -> None:
    assert sekv_gates.top_quarter(np.array([[0.0, 0, 0, 1], [0, 0, 0, 1]])) == 1
    assert sekv_gates.top_quarter(np.full((2, 4), 0.3)) == pytest.approx(0.25)
    assert sekv_gates.top_quarter(np.zeros((2, 4))) == 0
    assert sekv_gates.thirds(np.repeat([[0.0], [0.4], [0.2]], 2, axis=0)) == (0.0, pytest.approx(0.3))
    assert not math.isnan(sekv_gates.capped(gates(np.zeros((1, 1)), 8))[1])


def test_the_committed_claims_are_those_that_the_code_states() -> None:
    """Of every method that was measured as arms; docs/evidence/claims.md is made from the committed file."""
    result = json.loads((PACKAGE / "lab" / "results" / "claims-smollm2.json").read_text(encoding="utf-8"))
    compared = {
        name: {(claim["source"], claim["says"]) for claim in part["claims"] if "verdict" in claim["figures"]}
        for name, part in result["methods"].items()
    }
    measured = {name: claims for name, claims in compared.items() if claims}
    assert len(measured) >= 30
    for name, claims in measured.items():
        assert claims == {(statement.source, statement.says) for statement in statements_of(get(name))}, name
    page = PACKAGE.parent / "docs" / "evidence" / "claims.md"
    assert page.read_text(encoding="utf-8") == document(result, "smollm2")
