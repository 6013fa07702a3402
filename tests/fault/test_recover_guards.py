"""Recovering meets foreign files as reading does: behind walls, and what it will not finish it leaves as it was."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pytest
from store_support import make_prefill, make_step, one_sentence

from kvlens.meta import RunMeta
from kvlens.store.errors import DamagedTrace, SchemaTooNew, TraceError, UnreadableRun
from kvlens.store.reader import TraceReader, list_runs
from kvlens.store.recover import recover
from kvlens.store.schema import SCHEMA_VERSION, statements
from kvlens.store.writer import TraceWriter

ROOT = Path(__file__).parents[2]
UID = "foreign-run"


def foreign(runs: Path, *changes: str, status: str = "running") -> Path:
    """A run as kvlens makes one of a single head, interrupted, its trace changed by `changes`; the trace's path."""
    folder = runs / UID
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": status, "uid": UID}))
    with duckdb.connect(str(folder / "trace.duckdb")) as con:
        for statement in statements():
            con.execute(statement)
        con.execute("INSERT INTO run_state VALUES ('running', -1, NULL)")
        con.execute("INSERT INTO meta SELECT unnest(['layers', 'q_heads', 'kv_heads']), '1'")
        con.execute(f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}')")
        for change in changes:
            con.execute(change)
    return folder / "trace.duckdb"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("table", ["step", "token", "transfer", "run_state", "meta"])
def test_a_view_in_place_of_a_table_is_not_evaluated(tmp_path: Path, table: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("do not leak")
    leak = f"SELECT content AS text, content AS status, 0 AS last_step, content AS error FROM read_text('{secret}')"
    trace = foreign(tmp_path, f"DROP TABLE {table}", f"CREATE VIEW {table} AS {leak}")
    before = digest(trace)
    with pytest.raises(UnreadableRun, match=f"lacks table {table}") as caught:
        recover(tmp_path, UID)
    one_sentence(caught.value)
    assert "do not leak" not in (tmp_path / UID / "run.json").read_text()
    assert digest(trace) == before


@pytest.mark.parametrize("extra", ["CREATE VIEW peek AS SELECT 1", "CREATE MACRO sum(x) AS 7"])
def test_what_kvlens_never_writes_is_left_as_it_is(tmp_path: Path, extra: str) -> None:
    trace = foreign(tmp_path, extra)
    before = digest(trace)
    with pytest.raises(UnreadableRun, match="views or macros") as caught:
        recover(tmp_path, UID)
    one_sentence(caught.value)
    assert digest(trace) == before


def test_a_file_of_another_database_loads_no_extension(tmp_path: Path) -> None:
    trace = foreign(tmp_path)
    trace.unlink()
    with sqlite3.connect(trace) as con:
        con.execute("CREATE TABLE meta (key, value)")
    before = digest(trace)
    for call in (recover, TraceReader.open):
        with pytest.raises(UnreadableRun) as caught:
            call(tmp_path, UID)
        one_sentence(caught.value)
        assert "extension" not in str(caught.value).lower()
    assert digest(trace) == before


def test_a_newer_schema_is_refused_and_not_modified(tmp_path: Path) -> None:
    trace = foreign(tmp_path, "UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    before = digest(trace), (tmp_path / UID / "run.json").read_bytes()
    with pytest.raises(SchemaTooNew, match="update kvlens") as caught:
        recover(tmp_path, UID)
    one_sentence(caught.value)
    assert (digest(trace), (tmp_path / UID / "run.json").read_bytes()) == before


def test_a_linked_trace_or_lock_is_not_followed(tmp_path: Path) -> None:
    trace = foreign(tmp_path)
    elsewhere = tmp_path / "elsewhere.duckdb"
    trace.rename(elsewhere)
    trace.symlink_to(elsewhere)
    for call in (recover, TraceReader.open):
        with pytest.raises(UnreadableRun, match="is a link") as caught:
            call(tmp_path, UID)
        one_sentence(caught.value)
    precious = tmp_path / "precious.txt"
    precious.write_text("kept")
    (tmp_path / UID / "lock").unlink()
    (tmp_path / UID / "lock").symlink_to(precious)
    with pytest.raises(TraceError) as caught:
        recover(tmp_path, UID)
    one_sentence(caught.value)
    assert precious.read_text() == "kept"


CUBE = """
import sys, tracemalloc
from pathlib import Path
from kvlens.store.reader import TraceReader, UnreadableRun
tracemalloc.start()
try:
    with TraceReader.open(Path(sys.argv[1]), sys.argv[2]) as reader:
        reader.head_cube("entropy")
except UnreadableRun as error:
    print(error)
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.parametrize("steps", [2_000_000_000, 3])
def test_sizes_come_from_what_the_file_holds(tmp_path: Path, steps: int) -> None:
    foreign(tmp_path, f"UPDATE run_state SET last_step = {steps - 1}", status="completed")
    done = subprocess.run(
        [sys.executable, "-c", CUBE, str(tmp_path), UID], cwd=ROOT, capture_output=True, text=True, check=True
    )
    problem, peak = done.stdout.splitlines()
    assert "holds 0" in problem
    assert int(peak) < 100e6


def test_a_table_of_steps_alone_is_not_opened(tmp_path: Path) -> None:
    rows = "SELECT range, 0, 0, 0, 0, 0, 0, 0, 0, 0 FROM range(1000000)"
    trace = foreign(
        tmp_path,
        f"INSERT INTO step {rows}",
        "UPDATE run_state SET last_step = 999999",
        "UPDATE meta SET value = '256' WHERE key <> 'schema_version'",
        status="completed",
    )
    assert trace.stat().st_size < 20e6
    with pytest.raises(DamagedTrace) as caught:
        TraceReader.open(tmp_path, UID)
    one_sentence(caught.value)
    assert (caught.value.values["fault"], caught.value.values["table"]) == ("incomplete", "token")


def test_a_run_killed_while_it_was_made_is_not_called_damaged(tmp_path: Path) -> None:
    folder = tmp_path / UID
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": "created", "uid": UID}))
    states: list[Callable[[], object]] = [
        lambda: None,
        lambda: (folder / "trace.duckdb").write_bytes(b""),
        lambda: (folder / "trace.duckdb").write_bytes(b"\0" * 4096),
        lambda: ((folder / "trace.duckdb").unlink(), duckdb.connect(str(folder / "trace.duckdb")).close()),
    ]
    for state in states:
        state()
        for call in (TraceReader.open, recover):
            with pytest.raises(UnreadableRun, match="nothing is lost") as caught:
                call(tmp_path, UID)
            one_sentence(caught.value)
            assert "delete" not in str(caught.value)


#: Recovers with no room on the disk: no file may grow beyond the size given.
CRAMPED = """
import resource, signal, sys
from pathlib import Path
from kvlens.store.recover import recover
from kvlens.store.errors import DamagedTrace, TraceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    recover(Path(sys.argv[1]), sys.argv[2])
except TraceError as error:
    print(error)
    sys.exit(7)
"""
#: Writes steps and dies without a word.
DIE = """
import os, sys
from pathlib import Path
from tests.synthetic import write_synthetic
from kvlens.store.writer import TraceWriter
class Dies(TraceWriter):
    def finish(self, *arguments): self._flusher.put(self._block); self._flusher.stop(); os._exit(9)
write_synthetic(Path(sys.argv[1]), 4, 8, 4, steps=200, spans=40, uid=sys.argv[2], writer_class=Dies)
"""


def test_recovering_on_a_full_disk_says_so_and_loses_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIE, str(tmp_path), UID], cwd=ROOT, check=False, timeout=600)
    held = list_runs(tmp_path).iloc[0]
    for most in (4_000, 200_000):
        done = subprocess.run(
            [sys.executable, "-c", CRAMPED, str(tmp_path), UID, str(most)],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 7, done.stdout + done.stderr
        assert "free disk space" in done.stdout
        assert "delete" not in done.stdout
        assert done.stdout.count("\n") == 1
    made = recover(tmp_path, UID)
    assert (made.steps, made.lost) == (200, None)
    assert held["status"] == "interrupted"
    with TraceReader.open(tmp_path, UID) as reader:
        assert reader._has_rollup()
        assert reader.self_checks()["passed"].all()


def test_listed_steps_are_stored_steps(tmp_path: Path) -> None:
    sizes = (1, 1, 1, 2)
    writer = TraceWriter(tmp_path, UID, block_steps=8)
    writer.begin(RunMeta(layers=1, q_heads=1, kv_heads=1))
    writer.prefill(make_prefill())
    for step in range(11):
        writer.step(make_step(np.random.default_rng(step), step, sizes))
    until = time.monotonic() + 600
    while not writer._flusher.free.qsize() and time.monotonic() < until:  # the first block is on the disk
        time.sleep(0.01)
    writer._write_info()
    info = json.loads((tmp_path / UID / "run.json").read_text())
    assert (info["steps"], info["progress"]["step"]) == (8, 11)
    writer.finish("completed", None, [], {})
    assert list_runs(tmp_path).iloc[0]["steps"] == 11


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_an_ended_run_whose_trace_was_damaged_since_is_not_called_whole(tmp_path: Path, damage: str) -> None:
    trace = foreign(tmp_path, "UPDATE run_state SET status = 'completed'", status="completed")
    if damage == "cut":
        with trace.open("r+b") as file:
            file.truncate(trace.stat().st_size // 2)
    else:
        trace.unlink()
    with pytest.raises(UnreadableRun) as caught:
        recover(tmp_path, UID)
    assert caught.value.code == "run_unreadable"
    with pytest.raises(UnreadableRun) as caught:
        TraceReader.open(tmp_path, UID)
    assert caught.value.code == "run_unreadable"
