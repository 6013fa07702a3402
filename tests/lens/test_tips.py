"""Where an answer tips: the search on made answers, and on a run that lost."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from test_counterfactual import Lost, quiet
from typer.testing import CliRunner

import kvlens
from kvlens.cli.main import app
from kvlens.lens.storedtips import stored_tip
from kvlens.lens.tipping import Probe, Tip, find_tip
from kvlens.lens.tips import Axis, CannotTip, tips
from kvlens.lens.trylist import tries_in
from kvlens.store.reader import TraceReader


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    return Lost(tmp_path_factory.mktemp("lost"), ((1, 0),), 0.4, 1.0)


def search(is_right: Callable[[float], bool], low: float, high: float, step: float, most: int = 12) -> tuple[Tip, int]:
    """Search on a made answer -> what was found, and how many values were tested."""
    tested: list[float] = []

    def test(value: float) -> Probe:
        tested.append(value)
        return Probe(value, is_right(value), str(value))

    return find_tip("budget", test, low, high, step, most), len(tested)


@pytest.mark.parametrize("edge", [1.5, 31.7, 50.0, 98.9])
def test_the_tip_is_within_the_resolution(edge: float) -> None:
    for is_right in (lambda value: value >= edge, lambda value: value < edge):
        tip, tested = search(is_right, 0.0, 100.0, 1.0, most=20)
        assert tip.state == "tips"
        assert tip.lost is not None
        assert tip.right is not None
        assert 0 < abs(tip.right.value - tip.lost.value) <= 1.0
        assert min(tip.lost.value, tip.right.value) <= edge <= max(tip.lost.value, tip.right.value)
        assert tested <= 2 + 7 + 2


def test_an_answer_that_never_tips_costs_two_runs() -> None:
    assert [search(lambda value: True, 0, 100, 1)[0].state, search(lambda value: False, 0, 100, 1)[1]] == [
        "always_right",
        2,
    ]


def test_a_second_change_on_either_side_is_seen() -> None:
    tip, _ = search(lambda value: value >= 60 or 20 <= value <= 40, 0, 100, 1)
    assert tip.state == "not_monotone"
    assert (tip.lost, tip.right) == (None, None)
    assert len(tip.changes) == 3


def test_the_number_of_values_is_bounded() -> None:
    tip, tested = search(lambda value: value > 50, 0, 100, 1e-6, most=5)
    assert (tip.state, tested) == ("tips", 5)


def test_a_lost_run_tips_where_its_budget_holds_the_fact(lost: Lost) -> None:
    tip = tips(lost.runs, lost.uid, quiet, resolution=10)
    assert tip.state == "tips"
    assert tip.lost is not None
    assert tip.right is not None
    assert 30 <= tip.lost.value < tip.right.value <= 100
    assert tip.right.value - tip.lost.value <= 10
    for probe in tip.probes:
        with TraceReader.open(lost.runs, probe.uid) as reader:
            assert (reader.meta.output_text == "a5") is probe.right
            if probe.uid != lost.uid:
                assert reader.meta.parent == lost.uid
                assert dict(reader.meta.changed) == {"budget": f"{probe.value:g}%"}
                assert reader.meta.whatif is not None
    tries = tries_in(lost.runs, lost.uid)
    with TraceReader.open(lost.runs, lost.uid) as reader:
        stored = stored_tip(reader, tries, lambda uid: TraceReader.open(lost.runs, uid))
    own = [probe.uid for probe in tip.probes if probe.uid != lost.uid]
    assert {probe.uid for probe in stored.probes} >= set(own)
    assert stored.right == tip.right


def test_a_search_that_is_asked_for_again_runs_nothing(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it load the model. A finer search runs the new values alone."""
    first = tips(lost.runs, lost.uid, quiet, resolution=20)
    count = len(tries_in(lost.runs, lost.uid))
    with monkeypatch.context() as patch:
        patch.setattr("kvlens.lens.tips.reload", None)
        assert tips(lost.runs, lost.uid, quiet, resolution=20) == first
    assert len(tries_in(lost.runs, lost.uid)) == count
    finer = tips(lost.runs, lost.uid, quiet, resolution=4)
    added = len(tries_in(lost.runs, lost.uid)) - count
    assert 0 < added < len(finer.probes) - 1


def test_the_command_and_the_api_say_the_same(lost: Lost) -> None:
    told = CliRunner().invoke(
        app, ["tip", lost.uid, "--from", "30", "--to", "100", "--resolution", "40", "--json", "--runs", str(lost.runs)]
    )
    assert told.exit_code == 0
    found = json.loads(told.stdout)
    assert found["state"] == "tips"
    run = kvlens.open(lost.uid, runs=lost.runs)
    tip = run.tips(low=30, high=100, resolution=40, progress=False)
    assert [(probe.value, probe.right) for probe in tip.probes] == [
        (probe["value"], probe["right"]) for probe in found["probes"]
    ]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"parameter": "no_such"}, "not_numeric"),
        ({"parameter": "sinks"}, "bad_ends"),
        ({"low": 90.0, "high": 40.0}, "bad_ends"),
        ({"parameter": "sinks", "low": 1.0, "high": float("inf")}, "bad_ends"),
        ({"low": 0.1}, "bad_ends"),
    ],
)
def test_what_cannot_be_searched_is_refused(lost: Lost, asked: dict[str, float], code: str) -> None:
    with pytest.raises(CannotTip) as problem:
        tips(lost.runs, lost.uid, quiet, **asked)  # type: ignore[arg-type]
    assert problem.value.code == code
    with pytest.raises(kvlens.RequestError) as translated:
        kvlens.open(lost.uid, runs=lost.runs).tips(progress=False, **asked)  # type: ignore[arg-type]
    assert translated.value.code == code


def test_a_parameter_of_whole_numbers_is_searched_in_whole_numbers(lost: Lost) -> None:
    axis = Axis("sinks", 1.0, 9.0, 1.0, 4.0, True, None)

    def test(value: float) -> Probe:
        return Probe(value, value >= 4.5, str(value))

    tip = find_tip("sinks", test, axis.low, axis.high, axis.resolution, 12, (), axis.rounded)
    assert [probe.value for probe in tip.probes if probe.value not in (1.0, 9.0)], "a value between the ends"
    assert all(probe.value == int(probe.value) for probe in tip.probes)
    ran = tips(lost.runs, lost.uid, quiet, parameter="sinks", low=1.4, high=4.4)
    assert [probe.value for probe in ran.probes] == [1.0, 4.0], "what was run is what is told"
    with TraceReader.open(lost.runs, ran.probes[0].uid) as reader:
        assert reader.meta.config["sinks"] == 1
