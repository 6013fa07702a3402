"""Ctrl-C in a call of the API, progress, and races."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from apirun import BUDGET, METHOD, NEW

import kvlens
from kvlens.api.progress import Progress
from kvlens.runs.stopping import interruptible


def press_at(patch: pytest.MonkeyPatch, phase: str, done: int) -> None:
    """Have Ctrl-C pressed once a phase has come so far."""
    pressed: list[bool] = []

    def report(self: Progress, now: str, at: int, total: int) -> None:
        if (now, at) == (phase, done) and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    patch.setattr(Progress, "report", report)


def test_what_was_committed_is_stored(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    press_at(monkeypatch, "decode", 3)
    with pytest.raises(KeyboardInterrupt) as error:
        kvlens.run(kvlens.sample("demo"), METHOD, "60%", model="demo", max_new=NEW, ignore_eos=True, progress=False)
    assert isinstance(error.value, kvlens.Interrupted)
    assert error.value.code == "interrupted"
    stored = kvlens.open(error.value.values["uid"])
    assert stored.status == "cancelled"
    assert 3 <= len(stored.steps()) < NEW
    assert signal.getsignal(signal.SIGINT) is handler, "the caller's handler is back"


def test_a_run_without_a_step_cannot_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"model": "demo", "max_new": 2, "runs": tmp_path, "progress": False}
    with monkeypatch.context() as patch:
        press_at(patch, "decode", 0)
        with pytest.raises(kvlens.Interrupted) as error:
            kvlens.run(kvlens.sample("demo"), METHOD, "60%", against_full=False, **settings)
    stored = kvlens.open(str(error.value.values["uid"]), runs=tmp_path)
    assert stored.reader.n_steps == 0
    repeats: list[Callable[[], Any]] = [
        lambda: stored.hold(span=1),
        lambda: stored.drop(span=1),
        lambda: stored.at("90%"),
        stored.fewest_bytes,
        stored.tips,
        stored.ledger,
    ]
    for repeat in repeats:
        with pytest.raises(kvlens.RunError) as refusal:
            repeat()
        assert (refusal.value.code, refusal.value.values["detail"]) == ("cannot_repeat", "no_steps")
    assert len(kvlens.runs(runs=tmp_path)) == 1


def test_stopped_before_anything_is_stored(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    press_at(monkeypatch, "load", 0)
    before = len(kvlens.runs())
    with pytest.raises(kvlens.Interrupted) as error:
        kvlens.run(
            kvlens.sample("demo").text + " More.",
            METHOD,
            "60%",
            model="demo",
            max_new=NEW,
            against_full=False,
            progress=False,
        )
    assert error.value.values == {"uid": None}
    assert len(kvlens.runs()) == before


def test_a_second_press_ends_at_once() -> None:
    with interruptible() as cancelled:
        signal.raise_signal(signal.SIGINT)
        assert cancelled()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_on_another_thread_no_signal_is_listened_to() -> None:
    heard: list[bool] = []

    def work() -> None:
        with interruptible() as cancelled:
            heard.append(cancelled())

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [False]
    assert signal.getsignal(signal.SIGINT) is handler


def test_progress_is_shown_unless_it_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with Progress(shown) as bars:
            bars.report("decode", 2, 8)
            bars.report("decode", 8, 8)
        said = capsys.readouterr().err
        assert ("decode" in said and "8/8" in said) is shown


def test_repeats_show_progress_as_their_run_did(lost: kvlens.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def carried(models: Any, progress: bool) -> None:
        raise Asked(progress)

    monkeypatch.setattr("kvlens.api.storedrun.carrying", carried)
    span = lost.verdict.span
    runs = ((lost, False), (kvlens.open(lost.uid), True), (kvlens.open(lost.uid, progress=False), False))
    for run, inherited in runs:
        repeats: list[Callable[..., Any]] = [
            partial(run.hold, span),
            partial(run.drop, span),
            partial(run.at, "90%"),
            run.fewest_bytes,
        ]
        for repeat in repeats:
            for keywords, shown in (({}, inherited), ({"progress": not inherited}, not inherited)):
                with pytest.raises(Asked) as asked:
                    repeat(**keywords)
                assert asked.value.args == (shown,)


def test_a_race_is_a_list_of_runs_and_a_table(lost: kvlens.Run) -> None:
    sample = kvlens.sample("demo")
    keywords: dict[str, Any] = {"model": "demo", "max_new": NEW, "progress": False}
    race = kvlens.race(sample, [METHOD, "snapkv"], BUDGET, parameters={"snapkv": {"window": 8}}, **keywords)
    table = race.table()
    assert table["method"].tolist() == ["full", METHOD, "snapkv"]
    assert set(table.attrs["units"]) == set(table.columns)
    assert [run.meta.method for run in race] == table["method"].tolist()
    assert race[1].output == lost.output
    assert race[1].verdict.step == lost.verdict.step == table["lost_at_step"][1]
    assert race[2].meta.config["window"] == 8
    assert race[1].hold(span=lost.verdict.span).restored is True
    page = race._repr_html_()
    assert page.count("<tr>") == 4
    assert "<script" not in page
    assert "\n" not in repr(race)


def test_a_race_in_which_all_are_refused(runs: Path) -> None:
    with pytest.raises(kvlens.RequestError):
        kvlens.race(kvlens.sample("demo"), [METHOD], "0.1%", model="demo", max_new=NEW, progress=False)
    with pytest.raises(kvlens.RequestError) as error:
        kvlens.race(kvlens.sample("demo"), ["no_such_method"], model="demo", progress=False)
    assert error.value.code == "unknown_method"
