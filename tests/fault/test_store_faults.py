"""What happens to a trace when its process is killed, when two want it, and when its disk is full."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_support import one_sentence

from kvlens.meta import RunMeta
from kvlens.store.errors import RunBusy, TraceError
from kvlens.store.reader import TraceReader, list_runs
from kvlens.store.recover import delete_run, recover
from kvlens.store.writer import TraceWriter

ROOT = Path(__file__).parents[2]

#: A process that writes a run slowly, telling how many steps it has handed over.
WRITE = """
import sys, time
from pathlib import Path
from tests.synthetic import write_synthetic
from kvlens.store.writer import TraceWriter

class Slow(TraceWriter):
    def __init__(self, folder, uid, level):
        super().__init__(folder, uid, level, block_steps=8)
    def step(self, record):
        super().step(record)
        print(record.step, flush=True)
        time.sleep(0.003)

write_synthetic(Path(sys.argv[1]), 2, 4, 2, steps=int(sys.argv[3]), spans=12, uid=sys.argv[2], writer_class=Slow)
"""


def start_writer(runs: Path, uid: str, steps: int = 100_000) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITE, str(runs), uid, str(steps)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= step:
            return
    raise AssertionError("the writer ended early")


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_leaves_whole_blocks_that_recovery_rolls_up(tmp_path: Path, seed: int) -> None:
    pause = random.Random(seed)
    process = start_writer(tmp_path, "killed-run")
    wait_for_step(process, pause.randrange(9, 120))
    time.sleep(pause.random() * 0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list_runs(tmp_path)["status"].tolist() == ["interrupted"]
    with TraceReader.open(tmp_path, "killed-run") as before:  # readable even before recovery
        flushed = before.n_steps
        assert before.status == "interrupted"
        whole_run(before)
    assert recover(tmp_path, "killed-run").steps == flushed
    with TraceReader.open(tmp_path, "killed-run") as after:
        assert (after.n_steps, after.status, after.meta.recovered) == (flushed, "interrupted", True)
        whole_run(after)
        assert after._has_rollup() == (flushed > 0)
        assert after.self_checks()["passed"].all()
    assert not (tmp_path / "killed-run" / "trace.duckdb.wal").exists()
    row = list_runs(tmp_path).iloc[0]
    assert (row["status"], row["steps"]) == ("interrupted", flushed)
    with pytest.raises(TraceError, match="nothing to recover"):
        recover(tmp_path, "killed-run")
    delete_run(tmp_path, "killed-run")
    assert list_runs(tmp_path).empty


def whole_run(reader: TraceReader) -> None:
    """No table is ahead of another."""
    assert len(reader.steps()) == reader.n_steps
    table = reader.head_table()
    assert table.empty if not reader.n_steps else (table["n_steps"] == reader.n_steps).all()
    assert reader.tokens()["step"].notna().sum() == reader.n_steps
    assert sorted(reader.span_mass(1, 3)["step"].unique()) == list(range(reader.n_steps))


def test_a_run_that_is_written_is_busy_for_everyone_else(tmp_path: Path) -> None:
    process = start_writer(tmp_path, "busy-run")
    try:
        wait_for_step(process, 10)
        calls: list[Callable[[], object]] = [
            lambda: TraceReader.open(tmp_path, "busy-run"),
            lambda: recover(tmp_path, "busy-run"),
            lambda: delete_run(tmp_path, "busy-run"),
            lambda: TraceWriter(tmp_path, "busy-run").begin(RunMeta(layers=1, q_heads=1, kv_heads=1)),
        ]
        for call in calls:
            with pytest.raises(RunBusy) as caught:
                call()
            one_sentence(caught.value)
        assert list_runs(tmp_path)["status"].tolist() == ["running"]
    finally:
        process.kill()
        process.wait()
    with pytest.raises(RunBusy, match="exists already"):
        TraceWriter(tmp_path, "busy-run").begin(RunMeta(layers=1, q_heads=1, kv_heads=1))


#: Fills what it may: on a small file system when one can be mounted, else up to the largest file the process may write.
FULL = """
import json, resource, signal, sys
from pathlib import Path
from kvlens.store.errors import TraceError
from tests.synthetic import write_synthetic
limit = int(sys.argv[2])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    write_synthetic(Path(sys.argv[1]), 4, 8, 4, steps=100_000, spans=40, uid="full-disk")
except TraceError as error:
    print(error)
    sys.exit(7)
"""


@pytest.fixture(params=["file size limit", "small file system"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """(runs folder, largest file in bytes or 0). Where nothing may be mounted, both ways limit the file size,
    differently."""
    if request.param == "file size limit":
        yield tmp_path, 2_000_000
        return
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        yield tmp_path, 700_000
        return
    try:
        yield tmp_path, 0
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_ends_the_run_in_one_sentence_and_keeps_what_was_flushed(full_disk: tuple[Path, int]) -> None:
    runs, limit = full_disk
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(runs), str(limit)], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.count("\n") == 1
    assert "trace" in done.stdout
    assert "Traceback" not in done.stderr
    row = list_runs(runs).iloc[0]
    assert row["status"] == "failed"
    assert row["error"] == done.stdout.strip()
    with TraceReader.open(runs, "full-disk") as reader:
        assert reader.status == "failed"
        assert reader.n_steps > 0
        assert len(reader.steps()) == reader.n_steps
        assert (reader.head_table()["n_steps"] == reader.n_steps).all()
        flushed = reader.n_steps
    if limit:  # this process has no limit: space was made
        assert recover(runs, "full-disk").steps == flushed
        assert list_runs(runs).iloc[0]["status"] == "failed"
        with TraceReader.open(runs, "full-disk") as reader:
            assert reader._has_rollup()
