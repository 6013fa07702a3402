"""What a run reaches beside its result: no network, no file outside the folders of runs and of the cache, and no clock
but the steady one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader, list_runs
from kvlens.text.prompts import PromptText

ROOT = Path(__file__).resolve().parents[2]
TEXT = "The river was wide and the bridge was old. " * 8
WATCHED = """
import socket, sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind"):
        if event == "socket.getaddrinfo" or getattr(arguments[0], "family", None) != socket.AF_UNIX:
            print("network", event, arguments[1:], file=sys.stderr)
            raise SystemExit(77)
sys.addaudithook(watch)
sys.argv = ["kvlens", *sys.argv[1:]]
from kvlens.cli.main import main
main()
"""


def test_a_run_writes_into_its_folders_alone_and_asks_no_network(tmp_path: Path) -> None:
    """The process has a home, a folder for temporary files and a working folder of its own: what lies there afterwards
    was written by the run, by Python or by a library."""
    folders = {name: tmp_path / name for name in ("home", "tmp", "work", "runs", "cache")}
    for folder in folders.values():
        folder.mkdir()
    prompt = folders["work"] / "prompt.txt"
    prompt.write_text(TEXT)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(folders["home"]),
        "TMPDIR": str(folders["tmp"]),
        "KVLENS_RUNS": str(folders["runs"]),
        "KVLENS_CACHE": str(folders["cache"]),
        "OMP_NUM_THREADS": "1",
    }
    arguments = ("run", "prompt.txt", "--model", "demo", "--method", "snapkv", "--max-new", "2")
    process = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        cwd=folders["work"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    outside = [
        str(path.relative_to(tmp_path))
        for name in ("home", "tmp", "work")
        for path in folders[name].rglob("*")
        if path.is_file() and path != prompt
    ]
    assert outside == []
    assert len(list_runs(folders["runs"])) == 1


def test_a_clock_that_is_set_back_within_a_run_and_between_runs_harms_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = [0]
    real_s, real_ns = time.time, time.time_ns

    def back() -> float:
        hour[0] += 1
        return 3600.0 * hour[0]

    monkeypatch.setattr(time, "time", lambda: real_s() - back())
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - int(back() * 1e9))
    request = RunRequest(model="demo", method="snapkv", budget="50%", max_new=3, overrides={"window": 8})
    uids = [carry_out(request, PromptText(TEXT), tmp_path, lambda *_: None, lambda: False)[0] for _ in range(2)]
    assert hour[0] > 1, "the clock was read"
    for uid in uids:
        with TraceReader.open(tmp_path, uid) as reader:
            steps = reader.steps()
            assert reader.status == "completed"
            assert reader.self_checks()["passed"].all()
            assert steps["t_us"].is_monotonic_increasing
            assert (steps["dur_us"] > 0).all()
    listed = list_runs(tmp_path)
    assert set(listed["uid"]) == set(uids)
    assert (listed["duration_s"] >= 0).all()
