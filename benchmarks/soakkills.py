"""Attempts of the soak that kill a process or damage a file, and what must be there afterwards. Each is told its folder
and what it draws from, and says how it ended."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soakfiles import damage
from benchmarks.soakforks import LONGEST_S, forked
from kvlens import PACKAGE
from kvlens.app.ui.common.warm import COMMAND, Forked, Warm
from kvlens.store.export import EXPORTS, export
from kvlens.store.reader import TraceReader, list_runs
from kvlens.store.recover import delete_run, recover
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic

UID = "soak-run"


class Told(TraceWriter):
    """A writer that tells how many steps it has committed, block by block, and is slow enough to be met at work."""

    def __init__(self, folder: Path, uid: str, level: str) -> None:
        super().__init__(folder, uid, level, block_steps=8)

    def step(self, record: Any) -> None:
        super().step(record)
        time.sleep(0.001)
        print(self._flusher.stored, flush=True)


class DyingWriter(TraceWriter):
    """A writer whose process ends when all blocks are committed and nothing is finished."""

    def finish(self, *arguments: Any) -> None:
        if self._block is not None and self._block.n:
            self._flusher.put(self._block)
        self._flusher.stop()
        self._write_info()
        os._exit(0)


def read_whole(folder: Path, uid: str = UID) -> int:
    """Number of steps of a run whose tables agree with each other; AssertionError otherwise."""
    with TraceReader.open(folder, uid) as reader:
        assert len(reader.steps()) == reader.n_steps == int(reader.tokens()["step"].notna().sum())
        table = reader.head_table()
        assert table.empty if not reader.n_steps else (table["n_steps"] == reader.n_steps).all()
        return reader.n_steps


def _ask(work: Callable[[], object]) -> tuple[str, int]:
    """(outcome, the number printed last; -1 for none)."""
    outcome, sentence = forked(work)
    last = sentence.split()[-1] if sentence.split() else ""
    return outcome, int(last) if last.isdigit() else -1


def kill_writer(folder: Path, draw: random.Random) -> str:
    """A writer killed at any moment, recovered and read."""

    def result() -> None:
        write_synthetic(folder, 2, 4, 2, steps=4000, spans=12, uid=UID, writer_class=Told)

    _, sentence = forked(result, kill_after_s=0.1 + draw.random())
    lines = max((int(line) for line in sentence.split() if line.isdigit()), default=-1)
    outcome, steps = _ask(lambda: recover(folder, UID).steps)
    if outcome == "refused":  # killed before the trace was made
        return "nothing was committed" if lines <= 0 else "lost"
    if outcome != "done" or steps < lines:
        return "lost" if outcome == "done" else outcome
    outcome, read = _ask(lambda: read_whole(folder))
    return "kept" if (outcome, read) == ("done", steps) else f"unreadable: {outcome}"


def kill_recover(folder: Path, draw: random.Random, died: Path) -> str:
    """A recovery killed at any moment, done again."""
    shutil.copytree(died, folder, dirs_exist_ok=True)
    want = json.loads((folder / UID / "run.json").read_text())["steps"]
    if draw.random() < 0.5:
        damage(folder / UID, draw.choice(["log flip", "log zeroed tail"]), draw)
        want = 0
    forked(lambda: recover(folder, UID), kill_after_s=draw.random() * 0.4)
    outcome, _ = _ask(lambda: recover(folder, UID).steps)
    outcome, read = _ask(lambda: read_whole(folder))
    return outcome if outcome != "done" else "kept" if read >= want else "lost"


def kill_delete(folder: Path, draw: random.Random, died: Path) -> str:
    """A deletion killed at any moment, done again; the run beside it stays."""
    shutil.copytree(died, folder, dirs_exist_ok=True)
    shutil.copytree(died / UID, folder / "other-run")
    forked(lambda: delete_run(folder, UID), kill_after_s=draw.random() * 0.004)
    outcome, rows = _ask(lambda: len(list_runs(folder)))
    if outcome != "done" or rows not in (1, 2):
        return f"list: {outcome}"
    if (folder / UID).exists() and forked(lambda: delete_run(folder, UID))[0] != "done":
        return "not deleted"
    whole = all((folder / "other-run" / file.name).read_bytes() == file.read_bytes() for file in (died / UID).iterdir())
    return "kept" if whole and not (folder / UID).exists() else "lost"


def _command(folder: Path) -> list[str]:
    """A run on the demo model that takes seconds, into `folder`/runs."""
    prompt = folder / "p.txt"
    prompt.write_text("The river was wide and the bridge was old. " * 20)
    request = ["run", str(prompt), "--model", "demo", "--method", "streaming_llm", "--max-new", "2000", "--ignore-eos"]
    return [*COMMAND, *request, "--no-coverage", "--runs", str(folder / "runs")]


def _begun(folder: Path, ended: Callable[[], bool]) -> None:
    """Waits until the run has a trace."""
    until = time.monotonic() + LONGEST_S
    while not list((folder / "runs").glob("*/trace.duckdb")) and time.monotonic() < until and not ended():
        time.sleep(0.01)


def _read_killed(folder: Path) -> str:
    """Of a run that was killed: recovered and read; of one that had ended by then, read."""
    results = list((folder / "runs").glob("*"))
    if not results:
        return "nothing was committed"
    info = json.loads((results[0] / "run.json").read_text()) if (results[0] / "run.json").exists() else {}
    sentence, uid = info.get("steps", 0), results[0].name
    if info.get("status") == "completed":
        outcome, steps = _ask(lambda: read_whole(folder / "runs", uid))
        return outcome if outcome != "done" else "ended first" if steps == sentence else "lost"
    outcome, steps = _ask(lambda: recover(folder / "runs", uid).steps)
    if outcome == "refused":
        return "nothing was committed" if not sentence else "lost"
    return outcome if outcome != "done" else "kept" if steps >= sentence else "lost"


def kill_run(folder: Path, draw: random.Random) -> str:
    """`kvlens run` on the demo model, killed between its start and its end."""
    command = _command(folder)
    with subprocess.Popen(command, cwd=PACKAGE.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _begun(folder, lambda: process.poll() is not None)
        time.sleep(6 * draw.random())
        process.kill()
    return _read_killed(folder)


def kill_warm(folder: Path, draw: random.Random, warm: Warm) -> str:
    """The same run as a job that is forked, as the app does it: killed, and in a third of the attempts the process that
    forks with it. 'not forked' where the app would have started it from nothing."""
    warm.prepare()
    process = warm.start(_command(folder))
    if process is None:
        return "not forked"
    _begun(folder, lambda: _over(process))
    time.sleep(6 * draw.random())
    process.signal(signal.SIGKILL)
    if draw.random() < 1 / 3 and warm._parent is not None:
        warm._parent.kill()
    process.wait(LONGEST_S)
    process.stdout.close()
    return _read_killed(folder)


def _over(process: Forked) -> bool:
    try:
        process.wait(0)
    except subprocess.TimeoutExpired:
        return False
    return True


def digest(folder: Path) -> str:
    """Of all that a run's tables hold."""
    hasher = hashlib.sha256()
    with TraceReader.open(folder, UID) as reader:
        for subject in EXPORTS:
            held = io.BytesIO()
            export(reader, subject, "csv", held)
            hasher.update(held.getvalue())
    return hasher.hexdigest()


def damaged(folder: Path, draw: random.Random, died: Path, whole: Path, kind: str) -> str:
    """A damaged file, recovered where it is a log, and read."""
    shutil.copytree(died if kind.startswith("log") else whole, folder, dirs_exist_ok=True)
    damage(folder / UID, kind, draw)
    if kind.startswith("log"):
        outcome, _ = _ask(lambda: recover(folder, UID).steps)
        if outcome != "done":
            return outcome
        return {"done": "read"}.get(outcome := forked(lambda: read_whole(folder))[0], outcome)
    outcome, sentence = forked(lambda: digest(folder))
    if outcome == "done":
        return "read" if sentence == forked(lambda: digest(whole))[1] else "wrong"
    return "one sentence" if outcome == "refused" else outcome
