"""One run of another's making among good ones: it is named, and takes nothing else with it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from uiruns import Runs, Visit

from kvlens.app.report import report_bytes
from kvlens.store.reader import TraceReader, list_runs
from tests.synthetic import write_synthetic

BAD = "20260102-000000-badone"


@pytest.fixture
def folder(runs: Runs, tmp_path: Path) -> Path:
    """Two good runs of one prompt, and a third to be spoilt, the newest."""
    made = tmp_path / "runs"
    for uid in (runs.whole, runs.cancelled):
        shutil.copytree(runs.folder / uid, made / uid)
    write_synthetic(made, 2, 4, 2, 4, 8, uid=BAD, answer="x")
    (made / BAD / "trace.duckdb").chmod(0o644)
    return made


def info(folder: Path, **changes: object) -> None:
    path = folder / BAD / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def meta(folder: Path, key: str, value: str) -> None:
    with duckdb.connect(str(folder / BAD / "trace.duckdb")) as con:
        con.execute("DELETE FROM meta WHERE key = ?", [key])
        con.execute("INSERT INTO meta VALUES (?, ?)", [key, value])


def pipe(folder: Path, name: str) -> None:
    (folder / BAD / name).unlink(missing_ok=True)
    os.mkfifo(folder / BAD / name)


SPOILT: dict[str, Callable[[Path], None]] = {
    "run.json is a pipe": lambda folder: pipe(folder, "run.json"),
    "the lock is a pipe": lambda folder: pipe(folder, "lock"),
    "the prompt is a pipe": lambda folder: pipe(folder, "prompt.txt"),
    "the trace is a pipe": lambda folder: pipe(folder, "trace.duckdb"),
    "endless numbers": lambda folder: info(folder, steps=float("inf"), prompt_tokens=1e400, peak_bytes=10**400),
    "numbers of other kinds": lambda folder: info(folder, steps=1.5, duration_s="long", budget_bytes=[1], budget=7),
    "texts of other kinds": lambda folder: info(folder, created={"a": 1}, model=[1], reference=3, output_text={}),
    "a size that is a text": lambda folder: meta(folder, "full_kv_bytes", '"many"'),
    "an answer that is a list": lambda folder: meta(folder, "answer", "[[1]]"),
    "a task that is an object": lambda folder: meta(folder, "task", '{"a": 1}'),
}


@pytest.mark.parametrize("how", list(SPOILT))
def test_one_bad_run_leaves_the_list_and_other_pairs_alone(visit: Visit, runs: Runs, folder: Path, how: str) -> None:
    SPOILT[how](folder)
    assert set(list_runs(folder)["uid"]) == {runs.whole, runs.cancelled, BAD}
    visit(folder)
    app = visit(folder, "compare", run=runs.whole, cmp=runs.cancelled)
    assert not app.error, [box.value for box in app.error]
    assert not any("BAD" in text.value for text in app.text)
    assert any(runs.whole in shown.proto.body for shown in app.get("html"))


def test_a_linked_prompt_is_in_no_report(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("do not leak this line")
    (folder / BAD / "prompt.txt").unlink()
    (folder / BAD / "prompt.txt").symlink_to(secret)
    with TraceReader.open(folder, BAD) as reader:
        assert reader.prompt_text() == ""
        assert b"do not leak" not in report_bytes(reader)
