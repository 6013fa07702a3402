"""Traces of schemas 1 to 11, made by the statements of their time, still open: what they did not have was not
recorded."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import duckdb
import numpy as np
import pytest

from kvlens.app.gallery.bundle import hand_on
from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS
from kvlens.store.errors import UnreadableRun
from kvlens.store.export import EXPORTS, export
from kvlens.store.reader import TraceReader
from kvlens.store.recover import recover
from kvlens.store.schema import SCHEMA_VERSION, TABLES
from kvlens.store.versions import ADDED, tables_of

SCRIPTS = Path(__file__).resolve().parents[1]
STEPS, LAYERS = 3, 2
REWRITTEN = {"mass_rewritten"}
ZOOMS = {"zoom_asked", "zoom_refused"} | REWRITTEN
REFERENCE = {"reference_regret", "reference_unread"} | ZOOMS
NEWEST = REFERENCE | {"selection_recall"}
UNREAD = NEWEST | {"unread"}
MEAN = UNREAD | {"mass_mean", "mass_quantised"}
READ = MEAN | {"read_bytes"}
ENDED = {
    1: {"blocking_bytes", "ideal_bytes", "recalled_tokens", "reused_tokens", "similarity", "regret"} | READ,
    2: {"regret"} | READ,
    3: READ,
    4: MEAN,
    5: UNREAD,
    6: NEWEST,
    7: REFERENCE,
    8: REFERENCE,
    9: REFERENCE,
    10: ZOOMS,
    11: REWRITTEN,
    12: REWRITTEN,
}
versions = pytest.mark.parametrize("version", list(ENDED))


def make(root: Path, version: int) -> Path:
    """A folder with a finished run 'old-run' of that schema: 3 steps, 2 layers, one head, without rollups."""
    folder = root / "old-run"
    folder.mkdir()
    meta = {
        "schema_version": version,
        "layers": LAYERS,
        "q_heads": 1,
        "kv_heads": 1,
        "model": "m",
        "method": "full",
        "trace_level": "spans",
    }
    con = duckdb.connect(str(folder / "trace.duckdb"))
    con.execute((SCRIPTS / f"schema_v{version}.sql").read_text(encoding="utf-8"))
    con.executemany("INSERT INTO meta VALUES (?, ?)", [[key, json.dumps(value)] for key, value in meta.items()])
    con.execute("INSERT INTO run_state VALUES ('completed', $last, NULL)", {"last": STEPS - 1})
    for step in range(STEPS):
        con.execute("INSERT INTO step VALUES ($step, 0, 5, 1, 1, 10, 20, 30, 7, 0)", {"step": step})
        con.execute("INSERT INTO token (pos, step, token_id, text) VALUES ($step, $step, 1, 'x')", {"step": step})
        for layer in range(LAYERS):
            where = {"step": step, "layer": layer}
            con.execute(
                "INSERT INTO head_step (step, layer, q_head, kv_head, entropy) VALUES ($step, $layer, 0, 0, 1.5)", where
            )
            con.execute(
                "INSERT INTO kv_step (step, layer, kv_head, h2d_bytes, n_recalled) VALUES ($step, $layer, 0, 7, 2)",
                where,
            )
            con.execute("INSERT INTO transfer VALUES ($step, $layer, 0, 1, 'h2d', 'zoom', 7, 1, 4, 2, true)", where)
    con.execute("INSERT INTO span VALUES (1, 'page', 0, 3, -1, NULL, '', NULL, 'cold')")
    con.execute(
        "INSERT INTO event (step, layer, kv_head, kind, span) VALUES (1, 0, 0, 'recall', 1), (2, 0, 0, 'evict', 1)"
    )
    if version >= 3:
        con.execute(
            "INSERT INTO oracle (step, layer, q_head, span, full_mass, mass, tail_full) "
            "VALUES (1, 0, 0, [1], [40000], [0], 0.1)"
        )
    if version >= 2:
        con.execute("INSERT INTO journal VALUES (1, 0, NULL, 'kept', [0.5])")
    con.close()
    (folder / "run.json").write_text(json.dumps({"schema_version": version, "uid": "old-run", "status": "completed"}))
    return root


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], TraceReader]]:
    """opened(version): a finished run of that schema, made and opened once for all tests that only read."""

    @cache
    def reader(version: int) -> TraceReader:
        readers.append(TraceReader.open(make(tmp_path_factory.mktemp(f"v{version}"), version), "old-run"))
        return readers[-1]

    readers: list[TraceReader] = []
    yield reader
    for made in readers:
        made.close()


@versions
def test_it_opens_and_what_it_lacks_was_not_recorded(opened: Callable[[int], TraceReader], version: int) -> None:
    reader = opened(version)
    assert reader.metrics() == ["entropy"]
    assert reader.kv_metrics() == ["h2d_bytes", "n_recalled"]
    assert np.isnan(reader.kv_cube("similarity")).all()
    assert np.isnan(reader.head_cube("regret")).all()
    assert (reader.kv_cube("h2d_bytes") == 7).all()
    line = reader.head_timeline(1, 0)
    assert list(line.columns) == ["step", *HEAD_COLUMNS, *KV_COLUMNS]
    assert line[sorted(ENDED[version])].isna().all().all()
    table = reader.head_table()
    assert (table["kv_head_h2d_bytes_total"] == 7 * STEPS).all()
    for name in ("kv_head_similarity_mean", "kv_head_blocking_bytes_total", "regret_mean", "regret_max"):
        assert table[name].isna().all()
    assert reader.journal_names() == (["kept"] if version >= 2 else [])
    assert list(reader.journal("x").columns) == ["step", "layer", "kv_head", "name", "values"]
    assert reader.scores(0, 0, 0).empty
    assert reader.scores(0, 0, 0).attrs["candidates"] is None
    assert list(reader.transfer_times()["blocking_bytes"]) == [7 * LAYERS] * STEPS


@versions
def test_its_meta_says_what_it_said_and_no_more(opened: Callable[[int], TraceReader], version: int) -> None:
    reader = opened(version)
    meta = reader.meta
    assert (meta.schema_version, meta.model, meta.method, meta.trace_level) == (version, "m", "full", "spans")
    assert (meta.hold, meta.needle, meta.config) == ((), (), {})
    later = ("oracle", "reference", "parent", "whatif", "request", "budget_bytes", "machine", "output_text")
    assert meta.pick(later) == dict.fromkeys(later)


@versions
def test_its_events_do_not_say_whether_the_step_had_attended(
    opened: Callable[[int], TraceReader], version: int
) -> None:
    reader = opened(version)
    assert reader.events()["kind"].tolist() == ["recall", "evict"]
    assert reader.events()["after_attention"].isna().all()
    assert [tuple(reader.span_states(step, 0, 0).iloc[0]) for step in range(STEPS)] == [
        (1, "cold", "cold"),
        (1, "resident", "resident"),
        (1, "evicted", "evicted"),
    ]
    assert reader.state_changes(0, 0)["state"].tolist() == ["cold", "resident", "evicted"]


@pytest.mark.parametrize("version", [3, 4, 5, 6, 7, 8, 9, 10, 11])
def test_what_of_its_full_attention_was_not_read_was_not_recorded(
    opened: Callable[[int], TraceReader], version: int
) -> None:
    reader = opened(version)
    (row,) = reader.oracle(1, 0, 0).to_dict("records")
    assert row["regret"] == pytest.approx((40_000 / 65_535) ** 2)
    assert row["own"] == row["full"]
    assert np.isnan([row["unread"], row["reference"]]).all()
    assert not reader.has_reference_masses()
    assert np.isnan(reader.triples(1)[["unread", "effect"]]).all(axis=None)
    assert reader.effects(1).empty
    assert reader.lost_tokens(1).empty


@versions
def test_it_has_no_loss_no_full_attention_and_no_span_keys(opened: Callable[[int], TraceReader], version: int) -> None:
    reader = opened(version)
    assert reader.loss().empty
    assert reader.oracle(0, 0, 0).empty
    assert np.isnan(reader.oracle_tail(0, 0, 0))
    assert reader.oracle_step(0).empty
    every = reader.oracle_head(0, 0), reader.oracle_tails(0, 0), reader.lost_by_head(0, 0), reader.holes(0.0)
    assert not any((table["step"] == 0).any() for table in every)
    assert reader.regret_by_step().empty
    assert reader.triples(0).empty
    assert reader.span_keys(0, 0) is None


@pytest.mark.parametrize("version", [version for version in ENDED if version < 11])
def test_its_decisions_were_not_recorded(opened: Callable[[int], TraceReader], version: int) -> None:
    reader = opened(version)
    assert not reader.records_decisions()
    assert reader.decisions().empty
    assert reader.decision_counts().empty


@versions
@pytest.mark.parametrize("what", EXPORTS)
def test_it_can_be_exported(opened: Callable[[int], TraceReader], version: int, what: str) -> None:
    out = io.BytesIO()
    export(opened(version), what, "csv", out)
    assert out.getvalue().count(b"\n") >= 1


@pytest.mark.parametrize("version", [1, 8])
def test_it_can_be_handed_on_as_it_is(tmp_path: Path, version: int) -> None:
    runs, file = make(tmp_path, version), tmp_path / "old.tar.xz"
    (runs / "old-run" / "prompt.txt").write_text("text")
    hand_on(runs, {"old-run": ()}, file)
    with tarfile.open(file) as archive:
        archive.extract("old-run/trace.duckdb", tmp_path / "in", filter="data")
    for of in (runs, tmp_path / "in"):
        with duckdb.connect(str(of / "old-run" / "trace.duckdb"), read_only=True) as con:
            assert {row[0] for row in con.execute("SHOW TABLES").fetchall()} == tables_of(version, TABLES)
            assert con.execute("SELECT count(*) FROM transfer").fetchone() == (STEPS * LAYERS,)


@versions
def test_an_unfinished_one_is_finished_in_this_schema(tmp_path: Path, version: int) -> None:
    runs = make(tmp_path, version)
    with duckdb.connect(str(runs / "old-run" / "trace.duckdb")) as con:
        con.execute("UPDATE run_state SET status = 'running'")
    (runs / "old-run" / "run.json").write_text(
        json.dumps({"schema_version": version, "uid": "old-run", "status": "running"})
    )
    assert recover(runs, "old-run").steps == STEPS
    with TraceReader.open(runs, "old-run") as reader:
        assert reader.meta.schema_version == SCHEMA_VERSION
        found = {
            row[0] for row in reader._db.rows("SELECT table_name FROM duckdb_tables() WHERE database_name = 'run'")
        }
        assert found == set(TABLES)
        assert reader._has_rollup()
        assert (reader.head_table()["kv_head_h2d_bytes_total"] == 7 * STEPS).all()
        assert reader.kv_metrics() == ["h2d_bytes", "n_recalled"]
        assert reader.metrics() == ["entropy"]
        assert np.isnan(reader.head_summary("regret")).all()
    assert json.loads((runs / "old-run" / "run.json").read_text())["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize("version", [number - 1 for number, added in ADDED.items() if added.tables])
def test_a_newer_file_without_a_table_of_its_schema_is_refused(tmp_path: Path, version: int) -> None:
    runs = make(tmp_path, version)
    with duckdb.connect(str(runs / "old-run" / "trace.duckdb")) as con:
        con.execute("UPDATE meta SET value = $next WHERE key = 'schema_version'", {"next": str(version + 1)})
    with pytest.raises(UnreadableRun, match=f"lacks table {min(ADDED[version + 1].tables)}"):
        TraceReader.open(runs, "old-run")
