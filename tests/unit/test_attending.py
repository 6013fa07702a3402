"""A share as the budget of a method that keeps all KV: the share of the tokens it attends, wherever it is asked for."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.lens.listing import Listing
from kvlens.lens.trial_request import TrialRequest
from kvlens.lens.whatif import whatif
from kvlens.runs.carrying import carry_out
from kvlens.runs.memory import attended_share
from kvlens.runs.preflight import estimate, refuse
from kvlens.runs.races import Entrant, RaceRequest
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.studies.plan import Arm, StudyPlan
from kvlens.text.prompts import PromptText

TEXT = "the red key opens the old door and the green key opens the new one " * 6
KEEPING = [
    name
    for name in methods.BUILT_IN
    if methods.get(name).keeps_all and "keep" in {field.name for field in fields(methods.get(name).Parameters)}
]


@pytest.mark.parametrize("method", KEEPING)
def test_a_share_is_of_attended_tokens_in_a_run_and_in_a_race(method: str) -> None:
    request = RunRequest(model="demo", method=method, budget="20%", max_new=4)
    refuse(request, PromptText(TEXT))
    figures = estimate(TEXT, "demo", method, {}, "20%", 4)
    assert (figures["feasible"], figures["budget_bytes"], figures["config"]["keep"]) == (True, None, 0.2)
    assert figures["room"]
    (lane, _), *_ = RaceRequest(shared=request, entrants=(Entrant(method=method),)).lanes()
    assert (lane.budget, lane.overrides["keep"]) == (None, 0.2)
    arm = Arm(method=method, budget="20%")
    planned = StudyPlan(shared=request, entrants=(Entrant(method=method),)).request(arm)
    assert (planned.budget, planned.overrides["keep"]) == (None, 0.2)


def test_a_run_is_stored_with_what_it_attends_and_says_it(tmp_path: Path) -> None:
    lines: list[str] = []
    request = RunRequest(model="demo", method="quest", budget="20%", max_new=4)
    uid, status, _ = carry_out(request, PromptText(TEXT), tmp_path, lambda *_: None, lambda: False, lines.append)
    with TraceReader.open(tmp_path, uid) as reader:
        assert (status, reader.meta.budget_bytes, reader.meta.config["keep"]) == ("completed", None, 0.2)
    assert len(lines) == 1
    (told,) = Listing(tmp_path).read([uid])
    assert told is not None
    assert told.limit == "20% of attended tokens"


@pytest.mark.parametrize(
    ("method", "budget", "overrides", "share"),
    [
        ("quest", "20%", {}, 0.2),
        ("quest", "20%", {"keep": 0.5}, None),
        ("quest", "20%", {"tokens": 96}, None),
        ("quest", "100%", {}, 1.0),
        ("quest", None, {}, None),
        ("quest", "64MB", {}, None),
        ("full", "20%", {}, None),
        ("snapkv", "20%", {}, None),
    ],
)
def test_the_rule_is_for_shares_of_methods_with_a_parameter_for_them(
    method: str, budget: str | None, overrides: dict[str, float], share: float | None
) -> None:
    assert attended_share(method, budget, overrides) == share


@pytest.mark.parametrize("method", ["quest", "sparq", "seer", "chess"])
def test_a_run_and_its_repeat_attend_the_same_share_up_to_all_of_it(method: str, tmp_path: Path) -> None:
    """`whatif --budget 50%` and `--budget 100%` are what `run --budget` is. More is attended at a larger share, in
    whole pages; CHESS's ratios of grids and chunks bound it too."""
    runs = [run_of(method, budget, tmp_path) for budget in ("20%", "50%", "100%")]
    attended = []
    for uid, budget, keep in zip(runs[1:], ("50%", "100%"), (0.5, 1.0), strict=True):
        repeat, summary = whatif(tmp_path, runs[0], TrialRequest(changed={"budget": budget}), lambda *_: None)
        assert summary is not None
        with TraceReader.open(tmp_path, uid) as asked, TraceReader.open(tmp_path, repeat.uid) as repeated:
            assert repeated.meta.changed == {"keep": f"{keep:g}"}
            assert asked.meta.config == repeated.meta.config
            assert asked.meta.config is not None
            assert asked.meta.config["keep"] == keep
            first, again = (reader.kv_cube("attended_tokens")[0] for reader in (asked, repeated))
            assert (first == again).all()
            attended.append(first.mean())
    assert attended[0] < attended[1]


def run_of(method: str, budget: str, runs: Path) -> str:
    """A stored run of the toy, compared with full KV."""
    request = RunRequest(model="demo", method=method, budget=budget, max_new=4, against=True)
    uid, status, _ = carry_out(request, PromptText(TEXT), runs, lambda *_: None, lambda: False, lambda _: None)
    assert status == "completed"
    return uid


def test_a_budget_that_the_rule_is_not_for_is_refused() -> None:
    for method, budget in (("quest", "64tok"), ("full", "20%")):
        with pytest.raises(BudgetInfeasible):
            refuse(RunRequest(model="demo", method=method, budget=budget, max_new=4), PromptText(TEXT))
