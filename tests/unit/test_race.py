"""A race: lanes that decode in turns are the runs that they would be alone, and one that cannot run stops no other."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
import torch
from support import raises_code
from typer.testing import CliRunner

from kvlens.cli.main import app
from kvlens.engine import prefill
from kvlens.engine.prefill import Surprisals
from kvlens.engine.sharedpasses import SharedPasses
from kvlens.lens.listing import Search
from kvlens.lens.runlist import search_runs
from kvlens.lens.segments import segments_of
from kvlens.methods.snapkv import SnapKV
from kvlens.recording import recorder
from kvlens.runs import memory, races, storing, watching
from kvlens.runs import race as racing
from kvlens.runs.carrying import carry_out
from kvlens.runs.effects import Lost
from kvlens.runs.entrants import entrants
from kvlens.runs.frames import Frame, Maps, of_run
from kvlens.runs.lanes import LaneLog
from kvlens.runs.memory import RunBeyondMemory
from kvlens.runs.preflight import refuse
from kvlens.runs.race import race
from kvlens.runs.races import EXPLAINING, Entrant, Lane, RaceInfo, RaceRequest
from kvlens.runs.request import RunRequest
from kvlens.runs.turns import Hearing, Turns
from kvlens.runs.watching import Watched
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText
from kvlens.text.rendering import BadTemplate

TEXT = "The farmer carried the copper kettle to the old harbor. " * 16
SHARED = RunRequest(model="demo", budget="40%", max_new=10, ignore_eos=True, prefill_chunk=64)
KINDS = ("snapkv", "quest", "h2o", "keydiff", "infinigen", "freekv", "sekv")
"""among them one that keeps all KV, one that asks what tokens received, one that reads the prompt itself, one that
looks ahead and one that fetches behind the step's back"""
TIMES = "t_us|dur_us|wait_us|record_us|start_us|end_us|score_us|plan_us|copy_us|attend_us|rest_us"
OWN = (
    "created",
    "started",
    "run_uid",
    "reference",
    "load_s",
    "prefill_s",
    "prefill_us",
    "prompt_kept",
    "decode_s",
    "full_kv_s",
    "effect_s",
    "surprisal_s",
    "process_peak_bytes",
    "link_host_wait_s",
    "raced",
    "trace_stalls",
)
"""keys of the meta that differ between two runs of one request"""


class Watching:
    """Keeps what it is told."""

    def __init__(self, on_frame: Callable[[Frame], None] = lambda frame: None) -> None:
        self.phases: list[str] = []
        self.frames: dict[int, list[Frame]] = {}
        self.measured: dict[int, dict[int, list[Maps]]] = {}
        """of a lane's step"""
        self.order: list[tuple[int, str]] = []
        self.told: list[tuple[int, int]] = []
        """lane and step of every frame, as they came"""
        self.about: dict[str, int] = {}
        self._on_frame = on_frame

    def report(self, phase: str, done: int, total: int) -> None:
        self.phases.append(phase)

    def begun(self, race: RaceInfo) -> None:
        self.about = race.sizes

    def lane(self, number: int, lane: Lane) -> None:
        self.order.append((number, lane.state))

    def frame(self, frame: Frame) -> None:
        self.frames.setdefault(frame["lane"], []).append(frame)
        self.told.append((frame["lane"], frame["step"]))
        self._on_frame(frame)

    def maps(self, maps: Maps) -> None:
        self.measured.setdefault(maps["lane"], {}).setdefault(maps["step"], []).append(maps)


def raced(runs: Path, *names: str, watching: Watching | None = None, **changes: Any) -> RaceInfo:
    shared = SHARED.model_copy(update=changes)
    asked = RaceRequest(shared=shared, entrants=tuple(Entrant(method=name) for name in names))
    return race(asked, PromptText(TEXT, answer="harbor"), runs, watching or Watching(), lambda: False)


def test_a_lane_that_fails_after_its_output_is_judged_no_more() -> None:
    lane = Lane(method="snapkv")
    info = RaceInfo(id="r", created="now", model="demo", budget="20%", max_new=4, answer="harbor", lanes=[lane])
    log = LaneLog(info, PromptText(TEXT, answer="harbor"), Watching())
    log.change(0, {"state": EXPLAINING, "text": "the old harbor"})
    assert lane.right is True
    log.change(0, {"state": "failed", "message": "No room on the disk."})
    assert lane.right is None


def tables(runs: Path, uid: str) -> dict[str, list[tuple[Any, ...]]]:
    """All that a trace holds but times and names of runs."""
    found = {}
    with duckdb.connect(str(runs / uid / "trace.duckdb"), read_only=True) as file:
        names = [name for (name,) in file.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall()]
        for name in names:
            rows = file.execute(f"SELECT COLUMNS(lambda c: NOT regexp_full_match(c, '{TIMES}')) FROM {name}").fetchall()
            if name == "meta":
                rows = [row for row in rows if row[0] not in OWN]
            found[name] = sorted(map(repr, rows))
    return found


def codes(text: str) -> np.ndarray:
    """A map of a frame."""
    return np.frombuffer(base64.b64decode(text), np.uint8).astype(int)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RaceInfo, Watching, float]:
    """One race of all kinds, every step of which is sketched, and the seconds that it took."""
    runs, watching, began = tmp_path_factory.mktemp("race"), Watching(), time.perf_counter()
    asked = RaceRequest(shared=SHARED, entrants=entrants(",".join(KINDS), [], ["keydiff:block=64"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "SKETCHED_S", 0.0)
        info = race(asked, PromptText(TEXT, answer="harbor"), runs, watching, lambda: False)
    return runs, info, watching, time.perf_counter() - began


@pytest.fixture(scope="module")
def seen(timed: tuple[Path, RaceInfo, Watching, float]) -> tuple[Path, RaceInfo, Watching]:
    """The race, without its time."""
    return timed[:3]


def test_every_output_is_whole_before_any_loss_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last measures, surprisals and effects of a lane that ends first wait for the last token of the others."""
    decoded: list[int] = []
    whole_by_then: list[int] = []
    tell = Watched.decoded
    add, effects, finish = storing.add_surprisals, Lost.effects, recorder.Recorder.finish

    def note(self: Watched, text: str) -> None:
        decoded.append(self._number)
        tell(self, text)

    def count(work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            whole_by_then.append(len(set(decoded)))
            return work(*given)

        return counted

    monkeypatch.setattr(Watched, "decoded", note)
    raced(tmp_path, "streaming_llm")  # full KV's run, and its surprisals, are made here
    decoded.clear()
    monkeypatch.setattr(storing, "add_surprisals", count(add))
    monkeypatch.setattr(Lost, "effects", count(effects))
    monkeypatch.setattr(recorder.Recorder, "finish", count(finish))
    info = raced(tmp_path, "streaming_llm", "snapkv", "h2o")
    assert [lane.state for lane in info.lanes] == ["completed"] * 4
    assert set(whole_by_then) == {3}


def test_last_steps_stay_in_memory_for_seconds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that ended long before the others does not wait for them until its steps are measured."""
    clock, lanes = [100.0], SimpleNamespace(change=None, frame=None, maps=None)
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watching, "frame_of", lambda *given: {})
    monkeypatch.setattr(watching, "maps_of", lambda *given: {})
    watched: Any = Watched(0, 10, lambda *given: None, lanes)  # type: ignore[arg-type]
    watched.note_step(None)
    watched.decoded("")
    assert watched.may_wait()
    clock[0] += watching.IN_FLIGHT_S
    assert not watched.may_wait()
    watched.step(SimpleNamespace(step=0))
    assert watched.may_wait()


@pytest.mark.parametrize("method", KINDS)
def test_a_lane_is_the_run_that_it_would_be_alone(
    tmp_path: Path, seen: tuple[Path, RaceInfo, Watching], method: str
) -> None:
    runs, info, _ = seen
    lane = info.lanes[1 + KINDS.index(method)]
    request = next(
        request for request, _ in RaceRequest.model_validate(info.request).lanes() if request.method == method
    )
    assert request.against
    uid, status, text = carry_out(
        request, PromptText(TEXT, answer="harbor"), tmp_path, lambda *told: None, lambda: False
    )
    assert (lane.state, lane.text) == (status, text)
    mine, alone = tables(runs, str(lane.uid)), tables(tmp_path, uid)
    assert mine.keys() == alone.keys()
    assert len(mine["step"]) == 10
    for name, rows in alone.items():
        assert mine[name] == rows, name


def test_lanes_decode_in_turns_and_the_prompt_is_read_once(timed: tuple[Path, RaceInfo, Watching, float]) -> None:
    runs, info, watching, whole_s = timed
    own_s = []
    for number, lane in enumerate(info.lanes):
        with TraceReader.open(runs, str(lane.uid)) as reader:
            assert reader.meta.raced == (len(info.lanes) - 1 if number else None), lane.method
            assert reader.meta.prompt_kept == (number > 0 and lane.method != "keydiff"), lane.method
            assert reader.meta.reference == (info.lanes[0].uid if number else None)
            assert reader.meta.decode_s is not None
            own_s.append(reader.meta.decode_s)
    assert min(own_s) > 0
    assert sum(own_s) <= whole_s, "waiting for the others is no part of it"
    assert len(info.lanes) == 8
    made = dict.fromkeys(range(1, 8), 0)
    for number, step in watching.told:
        if number:
            made[number] = step + 1
            assert max(made.values()) - min(made.values()) <= 2, "no lane runs ahead of the others"
    assert set(made.values()) == {10}


def test_frames_tell_every_step_as_the_stored_run_does(seen: tuple[Path, RaceInfo, Watching]) -> None:
    runs, info, watching = seen
    assert watching.about["steps"] == 10
    for number, lane in enumerate(info.lanes):
        with TraceReader.open(runs, str(lane.uid)) as reader:
            stored = list(of_run(number, reader))
        assert watching.frames[number] == [frame for frame, _ in stored]
        assert watching.measured[number].keys() == set(range(10))
        assert any(len(told) == 2 for told in watching.measured[number].values()), "a sketch, then what was measured"
        for frame, maps in stored:
            for live in watching.measured[number][frame["step"]]:
                assert live | {"missed": ""} == maps | {"missed": ""}
                # a stored coverage is rounded, so that a share may be one step of the map's off
                assert np.abs(codes(live["missed"]) - codes(maps["missed"])).max() <= 1
                assert len(codes(live["read"])) == watching.about["layers"] * watching.about["kv_heads"]
        assert [frame["step"] for frame in watching.frames[number]] == list(range(10))
        parted = [frame["step"] for frame in watching.frames[number] if frame["agrees"] is False]
        assert lane.lost == (parted[0] if parted else None)
        assert [state for which, state in watching.order if which == number][-2:] == ["explaining", "completed"]
    assert any(frame["moved"] for frame in watching.frames[1 + KINDS.index("freekv")])
    assert "reference" in watching.phases


def test_a_race_is_stored_and_found_again(seen: tuple[Path, RaceInfo, Watching]) -> None:
    runs, info, _ = seen
    assert races.ids(runs) == [info.id]
    assert races.read(runs, info.id) == info
    with pytest.raises(TraceError, match="no race"):
        races.read(runs, "20200101-000000-abcdef")
    with raises_code("no_run_id", TraceError):
        races.read(runs, "../" + info.id)
    (runs / races.FOLDER / "20200101-000000-abcdef.json").write_text("{")
    with pytest.raises(TraceError, match="cannot be read"):
        races.read(runs, "20200101-000000-abcdef")


def test_a_refused_lane_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    watching = Watching()
    info = raced(tmp_path, "snapkv", "sekv", watching=watching, budget="9%")
    said = {lane.method: (lane.state, lane.uid is None) for lane in info.lanes}
    assert said == {"full": ("completed", False), "snapkv": ("completed", False), "sekv": ("refused", True)}
    assert "budget_infeasible" in str(info.lanes[2].message)
    assert (2, "refused") in watching.order
    assert 2 not in watching.frames


def test_where_every_lane_is_refused_nothing_is_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"budget_infeasible.*; budget_infeasible"):
        raced(tmp_path, "sekv", "freekv", budget="1%")
    assert list(tmp_path.iterdir()) == []


def test_a_lane_that_breaks_is_alone_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlens.methods.snapkv import SnapKV

    def broken(self: object, *what: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(SnapKV, "select", broken)
    info = raced(tmp_path, "snapkv", "streaming_llm")
    assert [lane.state for lane in info.lanes] == ["completed", "failed", "completed"]
    assert str(info.lanes[1].message).startswith("hook_raised: ")
    assert "a mistake" in str(info.lanes[1].message)
    assert info.lanes[1].uid is not None, "what was recorded of it stayed"


def test_cancelled_every_lane_keeps_what_was_recorded(tmp_path: Path) -> None:
    stop = threading.Event()
    shared = SHARED.model_copy(update={"max_new": 200, "budget": "70%"})
    asked = RaceRequest(shared=shared, entrants=entrants("snapkv,streaming_llm", [], []))
    watching = Watching(lambda frame: stop.set() if frame["lane"] == 1 and frame["step"] == 3 else None)
    info = race(asked, PromptText(TEXT), tmp_path, watching, stop.is_set)
    assert [lane.state for lane in info.lanes] == ["completed", "cancelled", "cancelled"]
    for lane in info.lanes[1:]:
        with TraceReader.open(tmp_path, str(lane.uid)) as reader:
            assert 0 < reader.n_steps < 200
            assert reader.self_checks()["passed"].all()


def test_lanes_share_the_surprisals_where_full_kv_was_stored_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "ROWS", 40)
    before = raced(tmp_path, "snapkv", "keydiff", "h2o")
    computed, counted = [], Surprisals._computed

    def count(self: Surprisals, hidden: torch.Tensor, targets: torch.Tensor) -> Iterator[torch.Tensor]:
        computed.append(len(hidden))
        return counted(self, hidden, targets)

    monkeypatch.setattr(Surprisals, "_computed", count)
    after = raced(tmp_path, "snapkv", "keydiff", "h2o")
    assert after.lanes[0].uid == before.lanes[0].uid
    assert len(computed) > 5, "the turn was handed on meanwhile"
    for first, second in zip(before.lanes[1:], after.lanes[1:], strict=True):
        with TraceReader.open(tmp_path, str(first.uid)) as one, TraceReader.open(tmp_path, str(second.uid)) as other:
            assert sum(computed) == other.meta.prompt_tokens, "every row once, and the last alone"
            assert (other.meta.no_surprisal, other.meta.surprisal_s) == (None, None)
            tokens = other.tokens()
            assert tokens[tokens["step"].isna()]["surprisal"].isna().sum() == 1
            pd.testing.assert_frame_equal(one.tokens().drop(columns="t_us"), tokens.drop(columns="t_us"))


def test_an_audience_that_fails_ends_the_race(tmp_path: Path) -> None:
    def leave(frame: Frame) -> None:
        if frame["lane"] == 1:
            raise OSError("nobody there")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="nobody there"):
        raced(tmp_path, "snapkv", watching=Watching(leave), max_new=200, budget="70%")
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "kvlens-lane"]


@pytest.mark.parametrize(
    ("names", "presets", "values", "said"),
    [
        ("snapkv,snapkv,snapkv", [], ["snapkv:window=8", "snapkv:window=4"], "once for each"),
        ("snapkv,snapkv", [], [], "named twice"),
        ("full", [], [], "is in every race"),
        (",", [], [], "at least one method"),
        ("nothing", [], [], "unknown method"),
        (",".join((*KINDS, "tova", "kivi")), [], [], "at most 8"),
        ("snapkv", ["tova:paper"], [], "--preset takes"),
        ("snapkv", [], ["window=8"], "--set takes"),
    ],
)
def test_what_cannot_race(names: str, presets: list[str], values: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RaceRequest(shared=SHARED, entrants=entrants(names, presets, values)).check()


def test_a_lane_that_repeats_another_is_refused(tmp_path: Path) -> None:
    """It names the value that the method has anyway."""
    usual = str(SnapKV.Parameters().kernel)
    asked = RaceRequest(
        shared=SHARED,
        entrants=entrants("snapkv,snapkv,snapkv", [], ["snapkv:kernel=", f"snapkv:kernel={usual}", "snapkv:kernel=3"]),
    )
    lanes = race(asked, PromptText(TEXT), tmp_path, Watching(), lambda: False).lanes
    assert [lane.state for lane in lanes] == ["completed", "completed", "refused", "completed"]
    assert str(lanes[2].message).startswith("this lane")
    assert lanes[2].uid is None
    table = search_runs(tmp_path, Search(method="snapkv"))
    differences = dict(zip(table["uid"], table["differs"], strict=True))
    assert differences == {lane.uid: f"kernel {value}" for lane, value in ((lanes[1], usual), (lanes[3], "3"))}
    listed = CliRunner().invoke(app, ["runs", "--runs", str(tmp_path)], env={"COLUMNS": "400"})
    assert all(difference in listed.stdout for difference in differences.values())


def test_lanes_that_fit_alone_and_not_together_are_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("quest", "arkvale", "freekv")
    asked = RaceRequest(shared=SHARED, entrants=entrants(",".join(names), [], []))
    alone = [refuse(request, PromptText(TEXT)) for request, _ in asked.lanes()]
    most = max(need.total for need in alone if need is not None)
    monkeypatch.setattr(memory, "is_kept", lambda request: True)
    monkeypatch.setattr(memory, "host_bytes", lambda: most)
    monkeypatch.setattr(racing, "prepare", lambda *_, **settings: pytest.fail("the model is loaded"))
    with pytest.raises(RunBeyondMemory) as refused:
        race(asked, PromptText(TEXT), tmp_path, Watching(), lambda: False)
    assert (refused.value.free, refused.value.lanes) == (most, len(names))
    assert refused.value.needed > most


def test_a_method_races_against_itself_under_other_parameters(tmp_path: Path) -> None:
    values = ["snapkv:window=8", "snapkv:window=", "snapkv:kernel=3"]
    asked = RaceRequest(shared=SHARED, entrants=entrants("snapkv,h2o,snapkv", [], values))
    asked.check()
    assert [entrant.overrides for entrant in asked.entrants] == [{"window": "8", "kernel": "3"}, {}, {"kernel": "3"}]
    assert [asked.difference(entrant) for entrant in asked.entrants] == ["window 8", "", "window as usual"]
    assert asked.difference(asked.entrants[2], {"window": 16}) == "window 16"
    shared = SHARED.model_copy(update={"max_new": 2})
    asked = RaceRequest(shared=shared, entrants=entrants("snapkv,snapkv", [], ["snapkv:window=8", "snapkv:window=4"]))
    info = race(asked, PromptText(TEXT), tmp_path, Watching(), lambda: False)
    assert [(lane.state, lane.differs) for lane in info.lanes[1:]] == [
        ("completed", "window 8"),
        ("completed", "window 4"),
    ]


def test_lanes_that_decode_the_same_tokens_share_full_kvs_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no limit every lane decodes full KV's tokens: one lane computes full KV beside it, for all."""
    made: list[SharedPasses] = []
    passes: list[int] = []

    class Counted(SharedPasses):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def keep(self, *values: Any) -> None:
            passes.append(1)
            super().keep(*values)

    monkeypatch.setattr(prefill, "SharedPasses", Counted)
    info = raced(tmp_path, "snapkv", "streaming_llm", "h2o", budget="100%")
    assert [lane.state for lane in info.lanes] == ["completed"] * 4
    (shared,) = made
    assert len(passes) > 0
    assert shared.reuses == 2 * len(passes)


def test_every_lane_has_the_segments_of_the_prompt(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(f"Rules: be brief. {TEXT}")
    words = ["race", str(prompt), "--methods", "snapkv,streaming_llm", "--budget", "40%", "--max-new", "2"]
    words += ["--segment", "rules=0:17", "--model", "demo", "--runs", str(tmp_path / "runs"), "--json"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, outcome.output
    lanes = json.loads(outcome.stdout.strip().splitlines()[-1])["lanes"]
    for lane in lanes:
        with TraceReader.open(tmp_path / "runs", lane["uid"]) as reader:
            assert "rules" in segments_of(reader)
    lost = CliRunner().invoke(app, [*words, "--segment", "ask=Nowhere"])
    assert (lost.exit_code, getattr(lost.exception, "code", None)) == (1, "segment_not_found")
    stray = CliRunner().invoke(app, [*words, "--chat-arg", "enable_thinking=false"])
    assert isinstance(stray.exception, BadTemplate)


def test_a_method_that_keeps_all_is_held_to_what_it_attends() -> None:
    shared = SHARED.model_copy(update={"budget": "25%"})
    asked = RaceRequest(shared=shared, entrants=entrants("quest,snapkv,snapkv", ["snapkv:paper"], ["snapkv:window=8"]))
    asked.check()
    (quest, said), (named, nothing), (plain, _) = asked.lanes()
    assert (quest.budget, quest.overrides) == (None, {"keep": 0.25})
    assert said is not None
    assert "attends 25 %" in said
    assert (named.preset, plain.preset, named.budget, nothing) == ("paper", None, "25%", None)
    assert named.overrides == plain.overrides == {"window": "8"}


def test_one_lane_works_at_a_time_and_turns_go_round() -> None:
    turns, order, inside = Turns(3), [], threading.Semaphore(1)

    def work(lane: int, steps: int) -> None:
        turns.wait(lane)
        for step in range(steps):
            assert inside.acquire(blocking=False), "another lane is at work"
            order.append((step, lane))
            time.sleep(0.002)
            inside.release()
            if step < steps - 1:
                turns.hand_on(lane)
        turns.leave(lane)

    Hearing().run([lambda: work(0, 3), lambda: work(1, 1), lambda: work(2, 2)])
    assert order == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 0)]
