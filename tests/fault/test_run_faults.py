"""A run that dies, is cancelled, or loses its disk: what was written stays readable, and the rest says what
happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(runs: Path, prompt: Path, *more: str) -> subprocess.Popen[str]:
    prompt.write_text("The river was wide and the bridge was old. " * 20)
    command = [
        sys.executable,
        "-m",
        "kvlens",
        "run",
        str(prompt),
        "--method",
        "streaming_llm",
        "--max-new",
        "6000",
        "--ignore-eos",
    ]
    return subprocess.Popen(
        [*command, "--runs", str(runs), "--no-coverage", *more],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_steps(runs: Path, process: subprocess.Popen[str], at_least: int) -> str:
    """The run's uid once run.json says that so many steps were written."""
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        for file in runs.glob("*/run.json"):
            if json.loads(file.read_text()).get("steps", 0) >= at_least:
                return file.parent.name
        time.sleep(0.1)
    raise AssertionError(
        f"no steps were written; {process.stderr.read() if process.poll() is not None and process.stderr else ''}"
    )


def kvlens(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvlens", *arguments], cwd=ROOT, text=True, capture_output=True, check=False
    )


def test_kill_9_leaves_a_readable_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs, tmp_path / "p.txt")
    uid = wait_for_steps(runs, process, 64)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    listed = json.loads(kvlens("runs", "--json", "--runs", str(runs)).stdout)
    assert [row["status"] for row in listed] == ["interrupted"]
    recovered = kvlens("runs", "recover", uid, "--runs", str(runs))
    assert recovered.returncode == 0, recovered.stderr
    shown = json.loads(kvlens("runs", "show", uid, "--runs", str(runs), "--json").stdout)
    assert shown["status"] == "interrupted"
    assert shown["steps"] >= 32
    table = kvlens("export", uid, "--what", "head-steps", "--runs", str(runs))
    assert len(table.stdout.splitlines()) == 1 + shown["steps"] * 48


def test_sigterm_cancels_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs, tmp_path / "p.txt")
    uid = wait_for_steps(runs, process, 32)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cancelled" in err
    shown = json.loads(kvlens("runs", "show", uid, "--runs", str(runs), "--json").stdout)
    assert shown["status"] == "cancelled"
    assert len(shown["self_check"]) > 5
    assert all(check["passed"] for check in shown["self_check"])
    assert shown["steps"] >= 32


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000)); sys.argv[0] = 'kvlens'; "
        "from kvlens.cli.main import main; main()"
    )
    prompt = tmp_path / "p.txt"
    prompt.write_text("The river was wide and the bridge was old. " * 20)
    arguments = [
        "run",
        str(prompt),
        "--method",
        "streaming_llm",
        "--max-new",
        "6000",
        "--ignore-eos",
        "--runs",
        str(runs),
        "--no-coverage",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", limited, *arguments], cwd=ROOT, text=True, capture_output=True, check=False, timeout=280
    )
    assert ended.returncode == 1
    assert "could not be written" in ended.stderr
    assert "Traceback" not in ended.stderr
    row = json.loads(kvlens("runs", "--json", "--runs", str(runs)).stdout)[0]
    assert row["status"] == "failed"
    assert "disk" in row["error"]
