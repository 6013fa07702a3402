"""A run that dies, is cancelled, or loses its disk: what was written stays readable, and the rest says what
happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from warmprocess import WarmProcess

FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
"""
STANDS = """
import pathlib, time
from kvlens.engine.prefill import Surprisals
def whole(self, progress):
    progress(0, 1)
    pathlib.Path("{begun}").touch()
    time.sleep(600)
Surprisals.whole = whole
"""
Kvlens = Callable[..., subprocess.CompletedProcess[str]]


def command(folder: Path) -> list[str]:
    """A long run of a short prompt, in folder/runs."""
    prompt = folder / "p.txt"
    prompt.write_text("The river was wide and the bridge was old. " * 20)
    options = ["--method", "streaming_llm", "--max-new", "6000", "--ignore-eos", "--no-coverage"]
    return ["run", str(prompt), *options, "--runs", str(folder / "runs")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_steps(runs: Path, pid: int, at_least: int) -> str:
    """The run's uid once run.json says that so many steps were written."""
    until = time.monotonic() + 600
    while time.monotonic() < until and alive(pid):
        for file in runs.glob("*/run.json"):
            if json.loads(file.read_text()).get("steps", 0) >= at_least:
                return file.parent.name
        time.sleep(0.02)
    raise AssertionError(f"no steps were written; {(runs.parent / 'err').read_text()}")


@pytest.fixture
def kvlens(warm: WarmProcess, tmp_path: Path) -> Kvlens:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return warm.kvlens(tmp_path, "", *arguments, "--runs", str(tmp_path / "runs"))

    return call


def test_kill_9_leaves_a_readable_run(warm: WarmProcess, tmp_path: Path, kvlens: Kvlens) -> None:
    pid = warm.begin(tmp_path, "", *command(tmp_path))
    uid = wait_for_steps(tmp_path / "runs", pid, 64)
    os.kill(pid, signal.SIGKILL)
    assert warm.end().returncode == -signal.SIGKILL
    listed = json.loads(kvlens("runs", "--json").stdout)
    assert [row["status"] for row in listed] == ["interrupted"]
    recovered = kvlens("runs", "recover", uid)
    assert recovered.returncode == 0, recovered.stderr
    shown = json.loads(kvlens("runs", "show", uid, "--json").stdout)
    assert shown["status"] == "interrupted"
    assert shown["steps"] >= 32
    table = kvlens("export", uid, "--what", "head-steps")
    assert len(table.stdout.splitlines()) == 1 + shown["steps"] * 48


def test_kill_9_after_the_last_step_costs_no_step(warm: WarmProcess, tmp_path: Path, kvlens: Kvlens) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("The river was wide and the bridge was old. " * 20)
    options = ["--method", "streaming_llm", "--max-new", "5", "--ignore-eos", "--no-coverage"]
    begun = tmp_path / "begun"
    pid = warm.begin(
        tmp_path, STANDS.format(begun=begun), "run", str(prompt), *options, "--runs", str(tmp_path / "runs")
    )
    until = time.monotonic() + 600
    while not begun.exists() and alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    wait_for_steps(tmp_path / "runs", pid, 5)
    os.kill(pid, signal.SIGKILL)
    assert warm.end().returncode == -signal.SIGKILL
    (listed,) = json.loads(kvlens("runs", "--json").stdout)
    recovered = kvlens("runs", "recover", listed["uid"])
    assert recovered.returncode == 0, recovered.stderr
    shown = json.loads(kvlens("runs", "show", listed["uid"], "--json").stdout)
    assert (shown["status"], shown["steps"]) == ("interrupted", 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_and_keeps_what_was_recorded(
    warm: WarmProcess, tmp_path: Path, kvlens: Kvlens, number: signal.Signals
) -> None:
    pid = warm.begin(tmp_path, "", *command(tmp_path))
    uid = wait_for_steps(tmp_path / "runs", pid, 32)
    os.kill(pid, number)
    ended = warm.end()
    assert ended.returncode == 128 + number
    assert "cancelled" in ended.stderr
    shown = json.loads(kvlens("runs", "show", uid, "--json").stdout)
    assert shown["status"] == "cancelled"
    assert len(shown["self_check"]) > 5
    assert all(check["passed"] for check in shown["self_check"])
    assert shown["steps"] >= 32


def test_a_full_disk_is_one_sentence(warm: WarmProcess, tmp_path: Path, kvlens: Kvlens) -> None:
    ended = warm.kvlens(tmp_path, FULL_DISK, *command(tmp_path))
    assert ended.returncode == 1
    (sentence,) = ended.stderr.strip().splitlines()
    assert sentence.startswith("kvlens: ")
    assert "Traceback" not in ended.stderr
    row = json.loads(kvlens("runs", "--json").stdout)[0]
    assert row["status"] == "failed"
    assert "disk" in row["error"]
