"""Jobs that are forked from a process that has imported everything: the same job as one that begins from nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvlens.app.ui.common import jobprocess, warm
from kvlens.app.ui.common.jobs import Job, JobManager
from kvlens.app.ui.common.warm import COMMAND, Forked, Warm
from kvlens.cli import warm as forking
from kvlens.runs.aheadfiles import REFERENCES
from kvlens.runs.preparing import READINGS as FOLDER
from kvlens.runs.request import READ_AHEAD
from kvlens.store.reader import TraceReader, list_runs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.path.exists("/dev/nvidiactl"), reason="jobs are forked on Linux without CUDA"
)


@pytest.fixture(scope="module")
def ready() -> Iterator[Warm]:
    """One process for all tests: it imports for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLENS_WARM", "on")
        made = Warm()
        made.prepare()
        yield made
        made._end()


def begun(ready: Warm, *arguments: str) -> Forked:
    process = ready.start([*COMMAND, *arguments])
    assert process is not None
    return process


def ended(process: Forked) -> tuple[str, int]:
    return process.stdout.read(), process.wait(240)


def waited(manager: JobManager, uid: str) -> Job:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        job = manager.get(uid)
        assert job is not None
        if not job.active:
            return job
        time.sleep(0.02)
    raise AssertionError("the job did not end")


def test_what_it_prints_and_its_status_are_those_of_a_process_of_its_own(ready: Warm, tmp_path: Path) -> None:
    for arguments in (("--version",), ("runs", "list", "--runs", str(tmp_path)), ("run", "no such file")):
        cold = subprocess.run(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert ended(begun(ready, *arguments)) == (cold.stdout, cold.returncode)


def test_a_job_leads_its_own_group_and_knows_the_environment_of_now(
    ready: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "of now"))
    (tmp_path / "p.txt").write_text("The river was wide. " * 12)
    process = begun(ready, "run", str(tmp_path / "p.txt"), "--method", "full", "--max-new", "3", "--progress-json")
    process.stdout.readline()
    assert process._pid is not None
    assert os.getpgid(process._pid) == process._pid != os.getpgid(0)
    said, status = ended(process)
    assert (status, '"status": "completed"' in said) == (0, True)
    assert list(list_runs(tmp_path / "of now")["steps"]) == [3]


def test_a_run_of_it_is_the_run_of_a_process_of_its_own(ready: Warm, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("The river was wide and the farmer carried the copper kettle home. " * 12)
    asked = ("run", str(tmp_path / "p.txt"), "--method", "snapkv", "--budget", "40%", "--max-new", "6", "--ignore-eos")
    said, status = ended(begun(ready, *asked, "--runs", str(tmp_path / "warm")))
    cold = subprocess.run([*COMMAND, *asked, "--runs", str(tmp_path / "cold")], capture_output=True, check=True)
    assert status == 0, said
    uids = said.split()[-1], cold.stdout.decode().split()[-1]
    with TraceReader.open(tmp_path / "warm", uids[0]) as one, TraceReader.open(tmp_path / "cold", uids[1]) as other:
        assert list(one.tokens()["token_id"]) == list(other.tokens()["token_id"])
        np.testing.assert_array_equal(one.head_cube("entropy"), other.head_cube("entropy"))


def test_a_cancelled_job_stores_what_it_has(ready: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobprocess, "warm", ready)
    (tmp_path / "p.txt").write_text("The river was wide. " * 12)
    manager = JobManager()
    argv = ["run", str(tmp_path / "p.txt"), "--method", "full", "--max-new", "4000", "--ignore-eos"]
    uid = manager.submit([*COMMAND, *argv, "--runs", str(tmp_path), "--progress-json"], "long")
    job = manager.get(uid)
    assert job is not None
    while job.active and job.phase != "decode":
        time.sleep(0.02)
    manager.cancel(uid)
    assert waited(manager, uid).state == "cancelled"
    assert list(list_runs(tmp_path)["status"]) == ["cancelled"]
    assert any(manager._folder.path("readings").iterdir()), "what it read is kept"
    assert FOLDER not in os.environ, "what a job is told is not what the server's own code is told"
    assert ended(begun(ready, "--version"))[1] == 0, "it serves the next"


def test_a_killed_job_is_told_by_its_signal(ready: Warm, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("The river was wide. " * 12)
    argv = ["run", str(tmp_path / "p.txt"), "--method", "full", "--max-new", "4000", "--ignore-eos"]
    process = begun(ready, *argv, "--runs", str(tmp_path), "--progress-json")
    process.signal(signal.SIGKILL)
    assert process.wait(240) == -signal.SIGKILL


def test_where_it_cannot_serve_a_job_starts_from_nothing(
    ready: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ready.start([sys.executable, "-c", "print(1)"]) is None, "another program"
    first = begun(ready, "--version")
    assert ready.start([*COMMAND, "--version"]) is None, "occupied"
    ended(first)
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert ready.start([*COMMAND, "--version"]) is None, "what it imported read another environment"
    with monkeypatch.context() as patch:
        (tmp_path / "changed.py").touch()
        patch.setattr(warm, "SOURCES", tmp_path)
        assert ready.start([*COMMAND, "--version"]) is None, "its sources are older"
    with monkeypatch.context() as patch:
        patch.setenv("KVLENS_WARM", "off")
        assert ready.start([*COMMAND, "--version"]) is None
    assert ended(begun(ready, "--version"))[1] == 0


def test_a_job_whose_parent_is_killed_before_it_begins_starts_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_WARM", "on")
    lost = Warm()
    lost.prepare()
    assert lost._parent is not None
    os.kill(lost._parent.pid, signal.SIGSTOP)
    monkeypatch.setattr(jobprocess, "warm", lost)
    manager = JobManager()
    uid = manager.submit([*COMMAND, "run", "no such file", "--progress-json"], "a run")
    while not lost._busy:
        time.sleep(0.01)
    os.kill(lost._parent.pid, signal.SIGKILL)
    job = waited(manager, uid)
    assert (job.state, "no such file" in str(job.message)) == ("failed", True)
    lost.prepare()
    assert lost._usable(), "another one is begun"
    lost._end()


def test_it_begins_with_the_first_job_and_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_WARM", "on")
    fresh = Warm()
    monkeypatch.setattr(jobprocess, "warm", fresh)
    manager = JobManager()
    assert fresh.status() is None
    job = waited(manager, manager.submit([*COMMAND, "run", "no such file", "--progress-json"], "a run"))
    assert "no such file" in str(job.message)
    status = fresh.status()
    assert status is not None
    assert status.resident_bytes is not None
    assert status.resident_bytes > 100e6
    assert fresh._parent is not None
    fresh.release()
    assert (fresh.status(), fresh._parent) == (None, None)


def test_an_idle_one_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_WARM", "on")
    monkeypatch.setenv(forking.IDLE, "0.01")
    short = Warm()
    short.prepare()
    assert short._parent is not None
    assert short._parent.wait(120) == 0
    assert short.status() is None


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("0", 600.0), ("-1", 600.0), ("inf", 600.0), ("x", 600.0)])
def test_the_idle_time_is_a_number_above_zero(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(forking.IDLE, text)
    assert forking.idle_seconds() == seconds
    monkeypatch.delenv(forking.IDLE)
    assert forking.idle_seconds() == 600.0


def test_one_that_is_occupied_is_not_released(ready: Warm) -> None:
    process = begun(ready, "--version")
    ready.release()
    assert ended(process)[1] == 0


def ran_argv(folder: Path, text: str, *more: str, steps: int = 6) -> list[str]:
    """A run of the toy that reads `text`, as the New run form begins it."""
    (folder / "p.txt").write_text(text)
    limits = ("--method", "snapkv", "--budget", "40%", "--max-new", str(steps), "--ignore-eos")
    return [*COMMAND, "run", str(folder / "p.txt"), *limits, *more, "--runs", str(folder), "--progress-json"]


@pytest.mark.parametrize("against", [False, True])
def test_a_run_finds_what_was_made_ahead(
    ready: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, against: bool
) -> None:
    """The reading of its prompt, and full KV's answer where it is compared. No list shows the reading; the run's
    numbers are those of a run that reads by itself, and its times count the reading once."""
    monkeypatch.setattr(jobprocess, "warm", ready)
    text, reads = "The river was wide and the farmer came home. " * 12, ("a prompt",)
    argv = ran_argv(tmp_path, text, *(["--against-full"] if against else []))
    manager = JobManager(folder=tmp_path / "jobs")
    assert manager.would_read(reads)
    ahead = manager.submit([*argv, READ_AHEAD], "ahead", reads=reads, ahead=True)
    assert manager.jobs() == []
    assert not manager.would_read(reads)
    assert manager.would_read(("another",)), "it gives way to another prompt"
    assert not manager.has_read(reads), "it goes on"
    until = time.monotonic() + 240
    while manager.get(ahead) is not None and time.monotonic() < until:
        time.sleep(0.02)
    assert manager.get(ahead) is None
    assert manager.has_read(reads)
    assert list_runs(tmp_path).empty, "the runs' folder gets nothing"
    made = manager._folder.path("readings") / REFERENCES
    assert made.is_dir() == against
    job = waited(manager, manager.submit(argv, "run", reads=reads))
    assert job.state == "done"
    runs = list_runs(tmp_path)
    assert sorted(runs["method"]) == (["full", "snapkv"] if against else ["snapkv"])
    assert not list(made.glob("*/run.json")), "the answer of full KV has moved"
    (tmp_path / "cold").mkdir()
    cold = ran_argv(tmp_path / "cold", text, *(["--against-full"] if against else []))
    alone = subprocess.run(cold[:-1], capture_output=True, check=True, text=True).stdout.split()[-1]
    for method in runs["method"]:
        others = list_runs(tmp_path / "cold")
        uids = (str(listed["uid"][listed["method"] == method].iloc[0]) for listed in (runs, others))
        with TraceReader.open(tmp_path, next(uids)) as one, TraceReader.open(tmp_path / "cold", next(uids)) as other:
            assert one.meta.prompt_kept == other.meta.prompt_kept == (against and method != "full")
            assert (one.meta.prefill_s is None) == (other.meta.prefill_s is None)
            assert list(one.tokens()["token_id"]) == list(other.tokens()["token_id"])
            np.testing.assert_array_equal(one.head_cube("entropy"), other.head_cube("entropy"))
            np.testing.assert_array_equal(one.tokens()["surprisal"], other.tokens()["surprisal"])
    assert alone in set(list_runs(tmp_path / "cold")["uid"])
    assert not list(manager._folder.path("readings").glob("*.ahead")), "its time is counted once"


def test_a_run_of_the_prompt_shows_the_answer_of_full_kv_as_it_comes(
    ready: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made ahead ends with the reading, then."""
    monkeypatch.setattr(jobprocess, "warm", ready)
    manager, text = JobManager(), "The river was wide. " * 12
    ahead = ran_argv(tmp_path, text, "--against-full", "--budget", "100%", steps=3000)
    reading = manager.get(manager.submit([*ahead, READ_AHEAD], "ahead", reads=("a prompt",), ahead=True))
    assert reading is not None
    while reading.active and reading.phase != "reference":
        time.sleep(0.02)
    uid = manager.submit(ran_argv(tmp_path, text), "run", reads=("a prompt",))
    assert waited(manager, uid).state == "done"
    assert reading.state == "cancelled"
    assert list(list_runs(tmp_path)["method"]) == ["snapkv"]


def test_what_is_read_ahead_gives_way_to_a_run_of_another_prompt(
    ready: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobprocess, "warm", ready)
    manager, argv = JobManager(), ran_argv(tmp_path, "The river was wide. " * 12)
    first = manager.submit([*argv, READ_AHEAD], "ahead", reads=("a prompt",), ahead=True)
    reading = manager.get(first)
    assert reading is not None
    assert manager.reads_ahead()
    uid = manager.submit(argv, "run", reads=("another",))
    assert reading.state == "cancelled"
    assert not manager.has_read(("a prompt",))
    assert not manager.would_read(("a third",)), "somebody waits for a run"
    assert waited(manager, uid).state == "done"
    assert manager.would_read(("a prompt",)), "it was not read to its end"
    assert not manager.reads_ahead()
