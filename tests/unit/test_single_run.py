"""A single run as a race of one: what its audience sees is what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvlens.engine.effect import POINTS
from kvlens.engine.ranking import ROUNDS
from kvlens.meta import Outcome
from kvlens.runs import storing
from kvlens.runs.carrying import carry_out
from kvlens.runs.frames import Frame, Maps, of_run
from kvlens.runs.races import EXPLAINING, Lane, RaceInfo
from kvlens.runs.repeatpair import pair
from kvlens.runs.request import RunRequest
from kvlens.store.amend import PENDING, is_outstanding
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

PROMPT = PromptText("The farmer carried the copper kettle to the old harbor. " * 24, answer="harbor")
REQUEST = RunRequest(
    model="demo", method="streaming_llm", budget="10%", max_new=8, ignore_eos=True, against=True, prefill_chunk=64
)


class Watching:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.races: list[RaceInfo] = []
        self.states: list[tuple[int, str]] = []
        self.judged: list[tuple[int, str, bool | None]] = []
        self.frames: dict[int, list[Frame]] = {}
        self.steps: dict[int, set[int]] = {}
        """of a lane, those with maps"""

    def report(self, phase: str, done: int, total: int) -> None:
        raise AssertionError("progress has a report of its own")

    def begun(self, race: RaceInfo) -> None:
        self.races.append(race.model_copy(deep=True))

    def lane(self, number: int, lane: Lane) -> None:
        self.states.append((number, lane.state))
        self.judged.append((number, lane.state, lane.right))

    def frame(self, frame: Frame) -> None:
        self.frames.setdefault(frame["lane"], []).append(frame)

    def maps(self, maps: Maps) -> None:
        self.steps.setdefault(maps["lane"], set()).add(maps["step"])


def run(runs: Path, **changes: object) -> tuple[str, Watching, list[str]]:
    """A run's uid, what its audience saw, and its progress: 'decode 1/6', ..."""
    watching, phases = Watching(), []
    request = REQUEST.model_copy(update=changes)
    report = lambda phase, done, total: phases.append(f"{phase} {done}/{total}")  # noqa: E731
    uid, _, _ = carry_out(request, PROMPT, runs, report, lambda: False, audience=watching)
    return uid, watching, phases


def frames_of(runs: Path, uid: str, lane: int) -> list[Frame]:
    with TraceReader.open(runs, uid) as reader:
        return [frame for frame, _ in of_run(lane, reader)]


def test_full_kv_and_the_run_are_two_lanes(tmp_path: Path) -> None:
    uid, watching, phases = run(tmp_path)
    (race,) = watching.races
    assert [lane.method for lane in race.lanes] == ["full", "streaming_llm"]
    assert (race.sizes["steps"], race.answer) == (8, "harbor")
    with TraceReader.open(tmp_path, uid) as reader:
        reference = str(reader.meta.reference)
    assert watching.frames[0] == frames_of(tmp_path, reference, 0)
    assert watching.frames[1] == frames_of(tmp_path, uid, 1)
    assert watching.steps[0] == watching.steps[1] == set(range(8))
    states = [state for lane, state in watching.states if lane == 1]
    assert states[-4:] == ["running", "explaining", "explaining", "completed"], "the output is whole, then it is stored"
    judged = [right for lane, state, right in watching.judged if lane == 1 and state == "explaining"]
    assert judged == [False] * 2, "the answer is judged before its effects are computed"
    order = [phases.index(phase) for phase in ("reference 8/8", "decode 0/8", "store 1/1", "effect 0/1")]
    assert order == sorted(order), "the run is stored before its effects are computed"
    points = [phase for phase in phases if phase.startswith("effect")][1:]
    assert len(points) in range(POINTS, POINTS * ROUNDS + 1, POINTS), "a round ends the ranking where nothing is lost"
    assert points == [f"effect {point}/{POINTS * ROUNDS}" for point in range(len(points))]


def rows_of(runs: Path, uid: str) -> dict[str, list[tuple[object, ...]]]:
    """Table -> rows of a trace, but for tables with times."""
    with duckdb.connect(str(runs / uid / "trace.duckdb"), read_only=True) as con:
        names = [str(name) for (name,) in con.execute("SHOW TABLES").fetchall()]
        return {
            name: sorted(tuple(map(repr, row)) for row in con.execute(f"SELECT * FROM {name}").fetchall())
            for name in names
            if name not in ("meta", "token", "step", "transfer", "phase", "event")
        }


def test_the_run_can_be_opened_before_its_effects_and_has_them_in_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str | None, int, str, bool]] = []

    class Early(Watching):
        def lane(self, number: int, lane: Lane) -> None:
            super().lane(number, lane)
            if lane.stored and lane.state == EXPLAINING:
                with TraceReader.open(tmp_path, str(lane.uid)) as reader:
                    effects = sum(len(reader.effects(step)) for step in range(reader.n_steps))
                    outstanding = is_outstanding(tmp_path / reader.uid)
                    seen.append((reader.meta.no_effects, effects, reader.status, outstanding))

    uid, _, _ = carry_out(REQUEST, PROMPT, tmp_path, ignore, lambda: False, audience=Early())
    assert seen == [(PENDING, 0, "completed", True)]
    late_runs = tmp_path / "late"
    whole, _, _ = carry_out(REQUEST, PROMPT, late_runs, ignore, lambda: False)
    assert rows_of(tmp_path, uid) == rows_of(late_runs, whole)
    assert len(rows_of(tmp_path, uid)["effect"])
    with TraceReader.open(tmp_path, uid) as early, TraceReader.open(late_runs, whole) as late:
        assert early.meta.no_effects is None
        assert early.meta.effect_order == late.meta.effect_order != ()
        assert early.meta.effect_steps == late.meta.effect_steps
        assert early.self_checks()["passed"].all()
    assert sorted(path.name for path in (tmp_path / uid).iterdir()) == [
        "lock",
        "prompt.txt",
        "run.json",
        "trace.duckdb",
    ]
    assert not is_outstanding(tmp_path / uid)


def test_effects_that_are_cancelled_leave_the_stored_run(tmp_path: Path) -> None:
    stop: list[bool] = []

    class Impatient(Watching):
        def lane(self, number: int, lane: Lane) -> None:
            stop.extend([True] if lane.stored else [])

    uid, status, _ = carry_out(REQUEST, PROMPT, tmp_path, ignore, lambda: bool(stop), audience=Impatient())
    assert status == "completed"
    with TraceReader.open(tmp_path, uid) as reader:
        assert reader.meta.no_effects not in (None, PENDING)


def test_a_run_that_fails_at_its_end_leaves_no_effects_outstanding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome_of = storing.Outcome

    def fail(**outcome: Any) -> Outcome:
        if outcome["no_effects"] == PENDING:
            raise ArithmeticError
        return outcome_of(**outcome)

    monkeypatch.setattr(storing, "Outcome", fail)
    with pytest.raises(ArithmeticError) as failure:  # keeps the frames alive, as a notebook does
        carry_out(REQUEST, PROMPT, tmp_path, ignore, lambda: False, audience=Watching())
    assert failure.traceback
    runs = [path for path in tmp_path.iterdir() if (path / "run.json").is_file()]
    assert runs
    assert not any(is_outstanding(run) for run in runs)


def ignore(phase: str, done: int, total: int) -> None:
    """Nobody follows the progress."""


def test_a_stored_reference_is_shown_whole(tmp_path: Path) -> None:
    run(tmp_path)
    _, watching, phases = run(tmp_path)
    assert not [phase for phase in phases if phase.startswith("reference")]
    assert len(watching.frames[0]) == 8
    assert [state for lane, state in watching.states if lane == 0] == ["prefill", "completed"]


def test_a_run_that_is_not_compared_is_one_lane(tmp_path: Path) -> None:
    uid, watching, _ = run(tmp_path, against=False)
    (race,) = watching.races
    assert [lane.method for lane in race.lanes] == ["streaming_llm"]
    assert watching.frames == {0: frames_of(tmp_path, uid, 0)}
    assert {frame["agrees"] for frame in watching.frames[0]} == {None}


@pytest.mark.parametrize("forced", [False, True])
def test_a_repeat_is_watched_alike(tmp_path: Path, forced: bool) -> None:
    uid, _, _ = run(tmp_path)
    watching = Watching()
    stored, _ = pair(tmp_path, uid, forced, lambda *told: None, lambda: False, watching)
    assert watching.frames[1] == frames_of(tmp_path, stored.uid, 1)
    assert watching.states[-1] == (1, "completed")
