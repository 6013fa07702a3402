"""Bad traces of the open format: each fault has its code, and names the table, file, row and column."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_support import one_sentence
from traces import KV_HEADS, LAYERS, PAGE, PROMPT, Q_HEADS, STEPS, write_full, write_minimal

from kvlens.trace import source
from kvlens.trace.check import check
from kvlens.trace.columns import VERSION
from kvlens.trace.faults import BadTrace
from kvlens.trace.limited import check_trace
from kvlens.trace.tables import TABLES

Change = Callable[[dict[str, list[Any]]], object]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full(tmp_path_factory.mktemp("written") / "trace")


@pytest.fixture
def trace(written: Path, tmp_path: Path) -> Path:
    """A copy of a trace with every table, each in one file."""
    folder = tmp_path / "trace"
    folder.mkdir()
    head = json.loads((written / "trace.json").read_text())
    for table, files in head["tables"].items():
        whole = pa.concat_tables([pq.read_table(written / file) for file in files], promote_options="permissive")
        pq.write_table(whole, folder / f"{table}.parquet")
        head["tables"][table] = [f"{table}.parquet"]
    (folder / "trace.json").write_text(json.dumps(head))
    return folder


def change(folder: Path, table: str, edit: Change, schema: bool = True) -> None:
    """Edit a table as lists of values; schema=False: its types follow from the values."""
    held = pq.read_table(folder / f"{table}.parquet")
    values = held.to_pydict()
    edit(values)
    kinds = {name: pa.array([], held.schema.field(name).type) for name in held.column_names}
    arrays = {n: pa.array(v, kinds[n].type if schema and n in kinds else None) for n, v in values.items()}
    pq.write_table(pa.table(arrays), folder / f"{table}.parquet")


def change_head(folder: Path, **keys: Any) -> None:
    head = json.loads((folder / "trace.json").read_text()) | keys
    (folder / "trace.json").write_text(json.dumps(head))


def put(column: str, row: int, value: Any) -> Change:
    return lambda values: values[column].__setitem__(row, value)


def again(row: int) -> Change:
    return lambda values: [column.append(column[row]) for column in values.values()]


def without(row: int) -> Change:
    return lambda values: [column.pop(row) for column in values.values()]


def first_fault(folder: Path) -> tuple[str, str | None, str | None, int | None]:
    with pytest.raises(BadTrace) as raised:
        check(folder)
    one_sentence(raised.value)
    fault = raised.value.faults[0]
    assert raised.value.code == fault.code
    assert raised.value.values["table"] == fault.table
    return fault.code, fault.table, fault.column, fault.row


def test_a_sound_trace_passes(trace: Path) -> None:
    checked = check(trace)
    assert set(checked.tables) == set(TABLES)
    assert checked.prompt == PROMPT
    assert checked.head.steps == STEPS


EDITS = {
    "a share that is NaN": ("head_step", put("coverage", 5, float("nan")), ("not_finite", "coverage", 5)),
    "a share above 1": ("head_step", put("coverage", 5, 1.5), ("out_of_range", "coverage", 5)),
    "an infinite entropy": ("head_step", put("entropy", 3, float("inf")), ("not_finite", "entropy", 3)),
    "masses that do not add up": ("head_step", put("mass_window", 4, 1.0), ("mass_sum", "mass_sink", 4)),
    "a layer too many": ("head_step", put("layer", 2, LAYERS), ("out_of_range", "layer", 2)),
    "a negative step": ("head_step", put("step", 0, -1), ("out_of_range", "step", 0)),
    "a head-step twice": ("head_step", again(7), ("duplicate", "step, layer, q_head", STEPS * LAYERS * Q_HEADS)),
    "a head-step missing": ("head_step", without(7), ("incomplete", "q_head", None)),
    "a span twice": ("span", again(0), ("duplicate", "span", 6)),
    "a span without an end": ("span", put("tok_end", 1, None), ("null", "tok_end", 1)),
    "a span that ends first": ("span", put("tok_end", 1, 3), ("reversed", "tok_end", 1)),
    "a span past the run": ("span", put("tok_end", 5, 9999), ("out_of_range", "tok_end", 5)),
    "a state of no span": ("span", put("state", 2, "lost"), ("unknown_word", "state", 2)),
    "a reason too long": ("span", put("reason", 2, "x" * 70_000), ("too_long", "reason", 2)),
    "a step missing": ("step", without(3), ("incomplete", "step", None)),
    "a step twice": ("step", again(3), ("duplicate", "step", STEPS)),
    "a token out of place": ("token", put("step", 45, 0), ("misplaced", "step", 45)),
    "an event of no span": ("event", put("span", 3, 777), ("unknown_span", "span", 3)),
    "an event of no kind": ("event", put("kind", 3, "gone"), ("unknown_word", "kind", 3)),
    "an unlisted span": ("head_span", put("span", 2, [777]), ("unequal_lists", "mass", 2)),
    "more spans than there are": ("head_span", put("span", 2, [0] * 7), ("duplicate", "span", 2)),
    "more positions than there are": ("oracle", put("lost_pos", 2, [0] * 999), ("duplicate", "lost_pos", 2)),
    "lists of two lengths": ("head_span", put("mass", 2, [0.5]), ("unequal_lists", "mass", 2)),
    "a mass that is NaN": ("head_span", put("mass", 2, [float("nan")] * 6), ("not_finite", "mass", 2)),
    "a mass that is NULL": ("oracle", put("mass", 2, [None] * 6), ("null", "mass", 2)),
    "a copy that ends first": ("transfer", put("end_us", 2, 0), ("reversed", "end_us", 2)),
    "a decision that adds up to less": ("decision", put("asked", 2, 9), ("wrong_sum", "asked", 2)),
    "refused spans left out": ("decision", put("refused_span", 2, []), ("unequal_lists", "refused_span", 2)),
    "a span's keys missing": ("span_key", without(4), ("incomplete", "span", None)),
    "a span's keys twice": ("span_key", again(4), ("duplicate", "layer, kv_head, span", LAYERS * KV_HEADS * 3)),
    "keys of no span": ("span_key", put("span", 4, 777), ("incomplete", "span", None)),
    "a key of another length": ("span_key", put("key", 4, [0.0] * 7), ("unequal_lists", "key", 4)),
    "a key with a gap": ("span_key", put("key", 4, [None] * 8), ("null", "key", 4)),
    "keys of two forms": ("span_key", put("form", 4, "pre-rope"), ("several_values", "form", 4)),
    "a form of no keys": ("span_key", put("form", 4, "raw"), ("unknown_word", "form", 4)),
    "a loss twice": ("loss", again(0), ("duplicate", "step", STEPS)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_fault_names_its_row_column_and_rule(trace: Path, name: str) -> None:
    table, edit, (code, column, row) = EDITS[name]
    change(trace, table, edit)
    assert first_fault(trace) == (code, table, column, row)


def test_a_row_is_named_in_the_file_that_holds_it(written: Path, tmp_path: Path) -> None:
    head = json.loads((written / "trace.json").read_text())
    files = head["tables"]["step"]
    assert len(files) == 3
    original = (written / files[1]).read_bytes()
    rows = pq.read_table(written / files[1]).to_pydict()
    rows["dur_us"][2] = -5
    try:
        pq.write_table(pa.table(rows), written / files[1])
        with pytest.raises(BadTrace) as raised:
            check(written)
    finally:
        (written / files[1]).write_bytes(original)
    assert (raised.value.faults[0].file, raised.value.faults[0].row) == (files[1], 2)
    assert raised.value.faults[0].value == "-5"


def test_columns_of_other_names_and_types_are_named(trace: Path) -> None:
    change(trace, "step", lambda values: values.update(durus=values["dur_us"], x_mine=values["dur_us"]))
    assert first_fault(trace) == ("unknown_column", "step", "durus", None)
    change(trace, "step", lambda values: [values.pop("durus"), values.pop("dur_us")])
    assert first_fault(trace) == ("missing_column", "step", "dur_us", None)
    change(trace, "step", lambda values: values.update(dur_us=["fast"] * STEPS))
    assert first_fault(trace) == ("wrong_type", "step", "dur_us", None)
    change(trace, "step", lambda values: values.update(dur_us=np.full(STEPS, 2**64 - 1, np.uint64)), schema=False)
    assert first_fault(trace) == ("out_of_range", "step", "dur_us", 0)


@pytest.mark.parametrize("table", [name for name, about in TABLES.items() if about.required])
def test_a_required_table_is_missed(trace: Path, table: str) -> None:
    head = json.loads((trace / "trace.json").read_text())
    del head["tables"][table]
    change_head(trace, tables=head["tables"])
    assert first_fault(trace) == ("missing_table", table, None, None)


@pytest.mark.parametrize("table", [name for name, about in TABLES.items() if not about.required])
def test_a_table_without_rows_needs_no_types(trace: Path, table: str) -> None:
    names = pq.read_schema(trace / f"{table}.parquet").names
    pq.write_table(pa.table({name: pa.nulls(0) for name in names}), trace / f"{table}.parquet")
    assert check(trace).tables[table].num_rows == 0


def test_a_table_of_no_name_is_named(trace: Path) -> None:
    head = json.loads((trace / "trace.json").read_text())
    change_head(trace, tables=head["tables"] | {"heads_step": ["step.parquet"], "x_own": ["step.parquet"]})
    assert first_fault(trace) == ("unknown_table", "heads_step", None, None)


@pytest.mark.parametrize(
    ("keys", "code", "column"),
    [
        ({"version": VERSION + 1}, "trace_too_new", "version"),
        ({"version": 0}, "head_invalid", "version"),
        ({"format": "other"}, "head_invalid", "format"),
        ({"layers": "two"}, "head_invalid", "layers"),
        ({"kv_heads": 3}, "head_invalid", None),
        ({"steps": -1}, "head_invalid", "steps"),
        ({"tables": {}}, "head_invalid", None),
        ({"database": "trace.duckdb"}, "head_invalid", None),
        ({"budget": "20%", "budget_bytes": None}, "head_invalid", None),
        ({"engine": ""}, "head_invalid", "engine"),
    ],
)
def test_a_head_that_is_none_names_its_key(trace: Path, keys: dict[str, Any], code: str, column: str | None) -> None:
    change_head(trace, **keys)
    assert first_fault(trace) == (code, None, column, None)


def test_no_trace_and_no_json(tmp_path: Path) -> None:
    assert first_fault(tmp_path / "nowhere")[0] == "trace_missing"
    (tmp_path / "trace.json").write_text("[" * 100_000)
    assert first_fault(tmp_path)[0] == "head_invalid"
    (tmp_path / "trace.json").write_bytes(b"\xff\xfe")
    assert first_fault(tmp_path)[0] == "head_invalid"


@pytest.mark.parametrize("file", ["../outside.parquet", "/etc/passwd", "gone.parquet", "link.parquet", ".", "a/b"])
def test_a_file_outside_the_folder_is_refused(trace: Path, file: str) -> None:
    outside = trace.parent / "outside.parquet"
    outside.write_bytes((trace / "step.parquet").read_bytes())
    os.symlink(outside, trace / "link.parquet")
    head = json.loads((trace / "trace.json").read_text())
    change_head(trace, tables=head["tables"] | {"step": [file]})
    assert first_fault(trace) == ("file_missing", "step", None, None)


def test_a_damaged_file_is_unreadable(trace: Path) -> None:
    whole = (trace / "step.parquet").read_bytes()
    for damage in (b"", b"PAR1", whole[: len(whole) // 2], whole[:40] + b"\0" * 40 + whole[80:]):
        (trace / "step.parquet").write_bytes(damage)
        with pytest.raises(BadTrace):
            check(trace)


def test_limits_hold_before_a_file_is_decoded(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_ROWS", 20)
    assert first_fault(trace)[:2] == ("trace_too_large", "token")
    monkeypatch.setattr(source, "MOST_ROWS", 1 << 26)
    monkeypatch.setattr(source, "MOST_BYTES", 900)
    assert first_fault(trace)[0] == "trace_too_large"
    monkeypatch.setattr(source, "MOST_BYTES", 2 << 30)
    monkeypatch.setattr(source, "MOST_FILES", 3)
    assert first_fault(trace)[0] == "trace_too_large"


def test_a_file_that_decodes_to_more_than_it_announces_ends_in_a_process_of_its_own(trace: Path) -> None:
    """One list of 40 million equal numbers: 320 MB from 1 kB."""
    flat = pa.array(np.zeros(40_000_000))
    lists = pa.ListArray.from_arrays(pa.array([0, len(flat)], pa.int32()), flat)
    rows = {"step": [0], "name": ["bomb"], "values": lists}
    pq.write_table(pa.table(rows), trace / "journal.parquet", compression="zstd")
    del flat, lists, rows
    assert (trace / "journal.parquet").stat().st_size < 10_000
    with pytest.raises(BadTrace) as raised:
        check_trace(trace, memory=1 << 30)
    assert raised.value.code == "trace_too_large"


def test_a_database_is_read_as_the_files_are(trace: Path) -> None:
    with duckdb.connect(str(trace / "trace.duckdb")) as con:
        for table in TABLES:
            con.execute(f"CREATE TABLE {table} AS SELECT * FROM read_parquet('{trace}/{table}.parquet')")
    files = check(trace)
    change_head(trace, tables={}, database="trace.duckdb")
    database = check(trace)
    for name, table in files.tables.items():
        assert database.tables[name].to_pydict() == table.to_pydict()
    with duckdb.connect(str(trace / "trace.duckdb")) as con:
        con.execute("UPDATE head_step SET coverage = 7 WHERE step = 2 AND layer = 1")
    assert first_fault(trace)[:3] == ("out_of_range", "head_step", "coverage")
    with duckdb.connect(str(trace / "trace.duckdb")) as con:
        con.execute("CREATE VIEW other AS SELECT * FROM read_csv('/etc/passwd')")
    assert first_fault(trace)[0] == "trace_unreadable"


def test_the_writer_refuses_other_shapes(tmp_path: Path) -> None:
    from kvlens.trace import Writer

    writer = Writer(tmp_path / "t", layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, engine="toy 0.1")
    with pytest.raises(ValueError, match=r"kv_step\.h2d_bytes"):
        writer.grid("kv_step", h2d_bytes=np.zeros((LAYERS, Q_HEADS)))
    write_minimal(tmp_path / "u")
    with pytest.raises(FileExistsError):
        write_minimal(tmp_path / "u")


def test_the_writers_sums_are_those_of_the_positions(tmp_path: Path) -> None:
    checked = check(write_full(tmp_path / "t", seed=3, steps=1))
    rng = np.random.default_rng(3)
    rng.random(PROMPT - 1)
    full = rng.dirichlet(np.ones(PROMPT + 1), (LAYERS, Q_HEADS)).astype(np.float32)
    head = checked.tables["head_step"].to_pydict()
    unread = full[..., :PAGE].sum(-1).reshape(-1)
    np.testing.assert_allclose(head["unread"], unread, atol=1e-6)
    np.testing.assert_allclose(head["coverage"], 1 - unread, atol=1e-6)
    np.testing.assert_allclose(head["regret"], unread, atol=1e-6)  # all other spans got more than full attention
