"""What happens when a run's files are damaged, newer, or made to do harm."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from store_support import one_sentence

from kvlens.meta import RunMeta
from kvlens.store.errors import RunNotFound, SchemaTooNew, TraceError, UnreadableRun
from kvlens.store.export import export
from kvlens.store.reader import TraceReader, list_runs
from kvlens.store.recover import delete_run, recover
from kvlens.store.schema import SCHEMA_VERSION, statements
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    write_synthetic(folder, 2, 4, 2, steps=40, spans=12, uid="good-run")
    return folder


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run that may be damaged."""
    shutil.copytree(finished, tmp_path / "runs")
    (tmp_path / "runs" / "good-run" / "trace.duckdb").chmod(0o644)
    return tmp_path / "runs"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.6, 0.95])
def test_a_truncated_trace_is_refused_or_reads_right(runs: Path, share: float) -> None:
    path = runs / "good-run" / "trace.duckdb"
    with TraceReader.open(runs, "good-run") as reader:
        right = reader.head_table()
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(TraceError) as caught, TraceReader.open(runs, "good-run") as reader:  # noqa: PT012 - either may find the damage
        assert reader.head_table().equals(right)
        export(reader, "span-mass", "csv", Path(os.devnull))
        raise UnreadableRun("All that was asked for lay before the cut.")
    one_sentence(caught.value)
    assert isinstance(caught.value, UnreadableRun)


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("UPDATE meta SET value = '99' WHERE key = 'schema_version'", SchemaTooNew, "update kvlens"),
        ("DROP TABLE transfer", UnreadableRun, "lacks table transfer"),
        ("UPDATE meta SET value = '{' WHERE key = 'layers'", UnreadableRun, "meta"),
        ("UPDATE meta SET value = '100000000' WHERE key = 'layers'", UnreadableRun, "meta"),
        ("DELETE FROM run_state", UnreadableRun, "how far"),
        ("ALTER TABLE head_step DROP COLUMN entropy", UnreadableRun, "damaged"),
    ],
)
def test_a_foreign_or_newer_file_is_named_as_such(
    runs: Path, statement: str, kind: type[TraceError], words: str
) -> None:
    con = duckdb.connect(str(runs / "good-run" / "trace.duckdb"))
    con.execute(statement)
    con.close()

    def read() -> None:
        with TraceReader.open(runs, "good-run") as reader:
            reader.metrics()

    with pytest.raises(kind, match=words) as caught:
        read()
    one_sentence(caught.value)


def test_a_hostile_file_reads_nothing_beside_itself(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("do not leak")
    folder = tmp_path / "hostile-run"
    folder.mkdir()
    con = duckdb.connect(str(folder / "trace.duckdb"))
    for statement in statements():
        con.execute(statement)
    con.execute("INSERT INTO run_state VALUES ('completed', -1, NULL)")
    con.execute("INSERT INTO meta SELECT unnest(['layers', 'q_heads', 'kv_heads', 'schema_version']), '1'")
    con.execute(f"UPDATE meta SET value = '{SCHEMA_VERSION}' WHERE key = 'schema_version'")
    con.execute("DROP TABLE self_check")
    leak = f"(SELECT content FROM read_text('{secret}'))"
    con.execute(f"CREATE VIEW self_check AS SELECT 'x' AS name, true AS passed, 0.0 AS value, {leak} AS detail")
    con.close()
    with pytest.raises(UnreadableRun, match="lacks table self_check"):
        TraceReader.open(tmp_path, "hostile-run")
    con = duckdb.connect(str(folder / "trace.duckdb"))
    con.execute("CREATE VIEW peek AS SELECT content FROM read_text('" + str(secret) + "')")
    con.execute("DROP VIEW self_check")
    con.execute("CREATE TABLE self_check (name VARCHAR, passed BOOLEAN, value DOUBLE, detail VARCHAR)")
    con.close()
    with TraceReader.open(tmp_path, "hostile-run") as reader:  # whole now; the second wall holds by itself
        with pytest.raises(TraceError, match="disabled"):
            reader._db.rows("SELECT * FROM run.main.peek")
        for statement in (
            f"SELECT * FROM read_text('{secret}')",
            f"COPY (SELECT 1) TO '{tmp_path / 'out.csv'}'",
            f"ATTACH '{tmp_path / 'other.duckdb'}' AS other",
            "SET enable_external_access = true",
            "INSTALL httpfs",
            "DELETE FROM run.main.meta",
        ):
            with pytest.raises(TraceError):
                reader._db.rows(statement)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    "uid", ["../x", "..", "", "a/b", "good-run\n", "GOOD-RUN", ".hidden-run", "a" * 65, "good-run\0", "%2e%2e%2f"]
)
def test_a_hostile_id_never_reaches_the_file_system(runs: Path, uid: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: TraceReader.open(runs, uid),
        lambda: recover(runs, uid),
        lambda: delete_run(runs, uid),
        lambda: TraceWriter(runs, uid or "/"),
    ]
    for call in calls:
        with pytest.raises(RunNotFound) as caught:
            call()
        one_sentence(caught.value)
    with pytest.raises(RunNotFound, match="no run"):
        TraceReader.open(runs, "absent-run")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"status": 3}', b"\xff\xfe", b"[" * 100_000, None])
def test_a_damaged_run_json_is_a_row_and_leaves_the_trace_readable(runs: Path, content: bytes | None) -> None:
    path = runs / "good-run" / "run.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    row = list_runs(runs).iloc[0]
    assert (row["uid"], row["status"]) == ("good-run", "unreadable")
    assert "run.json" in row["error"]
    with TraceReader.open(runs, "good-run") as reader:
        assert (reader.status, reader.n_steps) == ("completed", 40)


def test_a_run_json_of_wrong_types_still_lists(runs: Path) -> None:
    path = runs / "good-run" / "run.json"
    info = json.loads(path.read_text())
    path.write_text(
        json.dumps(info | {"steps": "many", "budget": {"a": [1]}, "model": 5, "created": 7, "peak_bytes": [1]})
    )
    row = list_runs(runs).iloc[0]
    assert row["status"] == "completed"
    assert row["steps"] != row["steps"]


def test_death_between_the_last_commit_and_run_json_is_not_an_interruption(runs: Path) -> None:
    path = runs / "good-run" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "finalizing"}))
    assert list_runs(runs).iloc[0]["status"] == "interrupted"
    assert recover(runs, "good-run").steps == 40
    assert list_runs(runs).iloc[0]["status"] == "completed"


def test_a_run_that_died_before_its_trace_was_made(tmp_path: Path) -> None:
    (tmp_path / "early-death").mkdir()
    (tmp_path / "early-death" / "run.json").write_text('{"status": "created"}')
    assert list_runs(tmp_path).iloc[0]["status"] == "interrupted"
    for call in (TraceReader.open, recover):
        with pytest.raises(UnreadableRun) as caught:
            call(tmp_path, "early-death")
        one_sentence(caught.value)
    delete_run(tmp_path, "early-death")
    assert not (tmp_path / "early-death").exists()


def test_a_reader_serves_many_threads(finished: Path) -> None:
    with TraceReader.open(finished, "good-run") as reader:
        want, wrong = reader.head_table(), []

        def work() -> None:
            for _ in range(5):
                if not reader.head_table().equals(want) or reader.head_spans(3, 1, 1).empty:
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_an_unwritable_runs_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = TraceWriter(tmp_path / "file")
    with pytest.raises(TraceError, match="cannot be made") as caught:
        writer.begin(RunMeta(layers=1, q_heads=1, kv_heads=1))
    one_sentence(caught.value)
