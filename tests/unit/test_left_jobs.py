"""Jobs whose server was killed: the next server finds them, follows them, and cancels them and no other process."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlens.app.ui.common import jobprocess
from kvlens.app.ui.common.jobprocess import Left, beginning, start_cold
from kvlens.app.ui.common.jobrecord import JobRecord, ProcessName, name_process, write_record
from kvlens.app.ui.common.jobs import NEVER_BEGUN, Job, JobManager
from kvlens.runs import races
from kvlens.runs.races import Lane, RaceInfo

SERVER = """
import sys, time
from pathlib import Path
from kvlens.app.ui.common.jobprocess import start_cold
from kvlens.app.ui.common.jobs import JobManager
jobs = JobManager(start_cold, Path(sys.argv[1]))
print(jobs.submit([sys.executable, "-c", sys.argv[2]], "the first", about="u", then="p"), flush=True)
print(jobs.submit([sys.executable, "-c", "print(1)"], "the second"), flush=True)
while jobs.jobs()[-1].process is None or not jobs.jobs()[-1].phase:
    time.sleep(0.01)
print("begun", flush=True)
time.sleep(600)
"""
GOES_ON = """
import json, pathlib, signal, sys, time
end = pathlib.Path({end!r})
def stopped(*_):
    print(json.dumps(dict(phase="done", uid="stored")), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stopped)
print(json.dumps(dict(phase="decode", done=3, total=9)), flush=True)
while not end.exists():
    time.sleep(0.01)
print(json.dumps(dict(phase="done", uid="whole")), flush=True)
"""


def done(uid: str) -> str:
    """Return the code of a job that has stored a run."""
    return f"print({json.dumps({'phase': 'done', 'uid': uid})!r})"


def until(condition: Callable[[], object], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[tuple[Path, str, str]]:
    """A folder of jobs whose server was killed while its first job ran, and the two jobs' ids."""
    folder, code = tmp_path / "jobs", GOES_ON.format(end=str(tmp_path / "end"))
    argv = [sys.executable, "-c", SERVER, str(folder), code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        first, second = (server.stdout.readline().strip() for _ in range(2))
        assert server.stdout.readline() == "begun\n"
        server.kill()
    yield folder, first, second
    (tmp_path / "end").touch()


def job_of(jobs: JobManager, uid: str) -> Job:
    job = jobs.get(uid)
    assert job is not None
    return job


def test_the_next_server_follows_the_job_to_its_end(killed: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, first, second = killed
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"jobs": 0o700, f"{first}.json": 0o600, f"{first}.log": 0o600, f"{second}.json": 0o600}
    jobs = JobManager(start_cold, folder)
    job = job_of(jobs, first)
    assert (job.state, job.active, job.title, job.about, job.then) == ("running", True, "the first", "u", "p")
    until(lambda: job.total == 9)
    assert (job_of(jobs, second).state, job_of(jobs, second).message) == ("failed", NEVER_BEGUN)
    waiting = jobs.submit([sys.executable, "-c", done("after")], "the third")
    assert JobManager(start_cold, folder).get(first) is None, "its server lives now"
    assert job_of(jobs, waiting).state == "queued", "one at a time"
    (tmp_path / "end").touch()
    until(lambda: not job.active)
    assert (job.state, job.uid) == ("done", "whole")
    until(lambda: not job_of(jobs, waiting).active)
    until(lambda: not list(folder.iterdir()))


def test_the_next_server_cancels_the_job(killed: tuple[Path, str, str]) -> None:
    folder, first, _ = killed
    jobs = JobManager(start_cold, folder)
    job = job_of(jobs, first)
    assert job.process is not None
    jobs.cancel(first)
    until(lambda: not job.active)
    assert (job.state, job.uid) == ("cancelled", "stored")
    until(lambda: not job.process.is_alive())


def test_a_job_that_ended_meanwhile_is_read_and_forgotten(killed: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, first, _ = killed
    process = JobRecord.model_validate_json((folder / f"{first}.json").read_bytes()).process
    assert process is not None
    (tmp_path / "end").touch()
    until(lambda: not process.is_alive())
    job = job_of(JobManager(start_cold, folder), first)
    assert (job.state, job.uid, job.active) == ("done", "whole", False)
    assert list(folder.iterdir()) == []


def test_the_prompt_of_a_job_that_goes_on_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prompt = tmp_path / "kvlens-jobs-killed" / "prompt.json"
    prompt.parent.mkdir()
    (prompt.parent / "lock").touch()
    prompt.touch()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as going:
        record = JobRecord(id="0123abcd", title="t", argv=[str(prompt)], created=1.0, process=name_process(going.pid))
        write_record(tmp_path / "jobs", record)
        jobs = JobManager(start_cold, tmp_path / "jobs")
        assert prompt.is_file()
        jobs.cancel("0123abcd")
        assert going.wait(120) == -signal.SIGTERM
    until(lambda: not job_of(jobs, "0123abcd").active)
    JobManager(start_cold, tmp_path / "jobs")
    assert not prompt.parent.exists()


def test_a_reused_process_id_is_neither_followed_nor_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as other:
        start_stamp = beginning(other.pid)
        assert start_stamp is not None
        record = JobRecord(
            id="0123abcd",
            title="t",
            argv=["x"],
            created=1.0,
            process=ProcessName(pid=other.pid, start_stamp=start_stamp + "0"),
        )
        write_record(tmp_path, record)
        jobs = JobManager(start_cold, tmp_path)
        job = job_of(jobs, "0123abcd")
        assert (job.state, job.active) == ("failed", False)
        jobs.cancel("0123abcd")
        Left(other.pid, start_stamp + "0").signal(signal.SIGKILL)
        assert other.poll() is None
        Left(other.pid, start_stamp).signal(signal.SIGKILL)
        assert other.wait(120) == -signal.SIGKILL
        assert beginning(other.pid) is None


def test_a_process_that_waits_for_its_parent_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        name = name_process(process.pid)
        assert name is not None
        until(lambda: not name.is_alive())


def test_files_that_are_no_records_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "0123abcd.json").write_text("{")
    (tmp_path / "x.json").write_text(JobRecord(id="../x", title="t", argv=[], created=1).model_dump_json())
    os.mkfifo(tmp_path / "89abcdef.json")
    assert JobManager(start_cold, tmp_path).jobs() == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_made_costs_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    jobs = JobManager(start_cold, tmp_path / "file" / "jobs")
    job = job_of(jobs, jobs.submit([sys.executable, "-c", done("u")], "t"))
    until(lambda: not job.active)
    assert (job.state, job.uid) == ("done", "u")


def test_the_same_run_is_queued_once(tmp_path: Path) -> None:
    jobs = JobManager(start_cold)
    end = tmp_path / "end"
    code = GOES_ON.format(end=str(end))
    one, other, third = (str(jobs.scratch("prompt.json", text)) for text in ("a", "a", "b"))
    first = jobs.submit([sys.executable, "-c", code, one], "t")
    assert jobs.submit([sys.executable, "-c", code, other], "t") == first
    assert [Path(path).is_file() for path in (one, other)] == [True, False]
    assert jobs.submit([sys.executable, "-c", code, third], "t") != first
    until(lambda: job_of(jobs, first).phase)
    jobs.cancel(first)
    again = jobs.submit([sys.executable, "-c", code, str(jobs.scratch("prompt.json", "a"))], "t")
    assert again != first, "a run that was cancelled may be asked for again"
    end.touch()
    until(lambda: not any(job.active for job in jobs.jobs()))
    assert job_of(jobs, again).state == "done"


def test_lanes_of_a_race_end_with_its_process() -> None:
    lanes = [{"method": name, "preset": None, "note": None} for name in ("full", "snapkv", "quest")]
    lines = [{"phase": "race", "lanes": lanes}]
    lines += [{"phase": "lane", "lane": 0, "state": "completed"}, {"phase": "lane", "lane": 1, "state": "running"}]
    code = f"import os\nfor line in {[json.dumps(line) for line in lines]!r}: print(line)\n"
    code += 'print(\'{"phase": "frame", "lane"\', end=\'\', flush=True); os.kill(os.getpid(), 9)'
    jobs = JobManager(start_cold)
    job = job_of(jobs, jobs.submit([sys.executable, "-c", code], "t"))
    until(lambda: not job.active)
    assert job.state == "failed"
    last = {line["lane"]: line["state"] for line in map(json.loads, job.lines) if line["phase"] == "lane"}
    assert last == {0: "completed", 1: "failed", 2: "failed"}


def test_a_process_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobprocess, "GRACE_S", 0.2)
    jobs = JobManager(start_cold)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    job = job_of(jobs, jobs.submit([sys.executable, "-c", code], "t"))
    until(lambda: list(job.log) == ["up"])
    jobs.cancel(job.id)
    until(lambda: not job.active)
    assert job.state == "cancelled"
    assert not job.process or not job.process.is_alive()


def test_no_lane_of_a_stored_race_goes_on(tmp_path: Path) -> None:
    lanes = [Lane(method=state, state=state) for state in (*races.UNFINISHED, "completed", "cancelled", "refused")]
    race = RaceInfo(id="20260101-000000-abcdef", created="", model="demo", budget="20%", max_new=1, lanes=lanes)
    races.write(tmp_path, race)
    stored = races.read(tmp_path, race.id)
    assert [lane.state for lane in stored.lanes] == [
        *["failed"] * len(races.UNFINISHED),
        "completed",
        "cancelled",
        "refused",
    ]
    assert [lane.message is None for lane in stored.lanes] == [*[False] * len(races.UNFINISHED), True, True, True]
