"""A trace of schema 1, made by the statements of that time, still opens: what it did not have was not recorded."""

from __future__ import annotations

import io
import json
from pathlib import Path

import duckdb
import numpy as np
import pytest

from kvlens.rows import KV_COLUMNS
from kvlens.store.errors import UnreadableRun
from kvlens.store.export import EXPORTS, export
from kvlens.store.reader import TraceReader
from kvlens.store.recover import recover
from kvlens.store.schema import SCHEMA_VERSION, TABLES

SCRIPT = Path(__file__).resolve().parents[1] / "schema_v1.sql"
STEPS, LAYERS = 3, 2
ADDED = {"blocking_bytes", "ideal_bytes", "recalled_tokens", "reused_tokens", "similarity"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a finished run 'old-run' of schema 1: 3 steps, 2 layers, one head, without rollups."""
    folder = tmp_path / "old-run"
    folder.mkdir()
    meta = {"schema_version": 1, "layers": LAYERS, "q_heads": 1, "kv_heads": 1, "model": "m", "method": "full", "trace_level": "spans"}
    con = duckdb.connect(str(folder / "trace.duckdb"))
    con.execute(SCRIPT.read_text(encoding="utf-8"))
    con.executemany("INSERT INTO meta VALUES (?, ?)", [[key, json.dumps(value)] for key, value in meta.items()])
    con.execute("INSERT INTO run_state VALUES ('completed', $last, NULL)", {"last": STEPS - 1})
    for step in range(STEPS):
        con.execute("INSERT INTO step VALUES ($step, 0, 5, 1, 1, 10, 20, 30, 7, 0)", {"step": step})
        con.execute("INSERT INTO token (pos, step, token_id, text) VALUES ($step, $step, 1, 'x')", {"step": step})
        for layer in range(LAYERS):
            where = {"step": step, "layer": layer}
            con.execute("INSERT INTO head_step (step, layer, q_head, kv_head, entropy) VALUES ($step, $layer, 0, 0, 1.5)", where)
            con.execute("INSERT INTO kv_step (step, layer, kv_head, h2d_bytes, n_recalled) VALUES ($step, $layer, 0, 7, 2)", where)
            con.execute("INSERT INTO transfer VALUES ($step, $layer, 0, 1, 'h2d', 'zoom', 7, 1, 4, 2, true)", where)
    con.close()
    (folder / "run.json").write_text(json.dumps({"schema_version": 1, "uid": "old-run", "status": "completed"}))
    return tmp_path


def test_it_opens_and_what_it_lacks_was_not_recorded(runs: Path) -> None:
    with TraceReader.open(runs, "old-run") as reader:
        assert reader.kv_metrics() == ["h2d_bytes", "n_recalled"]
        assert np.isnan(reader.kv_cube("similarity")).all()
        assert (reader.kv_cube("h2d_bytes") == 7).all()
        line = reader.head_timeline(1, 0)
        assert list(line.columns[-len(KV_COLUMNS) :]) == list(KV_COLUMNS)
        assert line[sorted(ADDED)].isna().all().all()
        table = reader.head_table()
        assert (table["kv_head_h2d_bytes_total"] == 7 * STEPS).all()
        assert table["kv_head_similarity_mean"].isna().all()
        assert table["kv_head_blocking_bytes_total"].isna().all()
        assert reader.journal().empty
        assert reader.journal_names() == []
        assert list(reader.journal("x").columns) == ["step", "layer", "kv_head", "name", "values"]
        assert reader.scores(0, 0, 0).empty
        assert reader.scores(0, 0, 0).attrs["candidates"] is None
        assert list(reader.transfer_times()["blocking_bytes"]) == [7 * LAYERS] * STEPS


@pytest.mark.parametrize("what", EXPORTS)
def test_it_can_be_exported(runs: Path, what: str) -> None:
    out = io.BytesIO()
    with TraceReader.open(runs, "old-run") as reader:
        export(reader, what, "csv", out)
    assert out.getvalue().count(b"\n") >= 1


def test_an_unfinished_one_is_finished_in_this_schema(runs: Path) -> None:
    with duckdb.connect(str(runs / "old-run" / "trace.duckdb")) as con:
        con.execute("UPDATE run_state SET status = 'running'")
    (runs / "old-run" / "run.json").write_text(json.dumps({"schema_version": 1, "uid": "old-run", "status": "running"}))
    assert recover(runs, "old-run") == STEPS
    with TraceReader.open(runs, "old-run") as reader:
        assert reader.meta["schema_version"] == SCHEMA_VERSION
        found = {row[0] for row in reader._db.rows("SELECT table_name FROM duckdb_tables() WHERE database_name = 'run'")}
        assert found == set(TABLES)
        assert reader._has_rollup()
        assert (reader.head_table()["kv_head_h2d_bytes_total"] == 7 * STEPS).all()
        assert reader.kv_metrics() == ["h2d_bytes", "n_recalled"]
    assert json.loads((runs / "old-run" / "run.json").read_text())["schema_version"] == SCHEMA_VERSION


def test_a_newer_file_without_its_journal_is_refused(runs: Path) -> None:
    with duckdb.connect(str(runs / "old-run" / "trace.duckdb")) as con:
        con.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    with pytest.raises(UnreadableRun, match="lacks table journal"):
        TraceReader.open(runs, "old-run")
