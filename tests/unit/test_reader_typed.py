"""Typed spans, sizes and cells of a reader, and what is raised if a trace lacks them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from kvlens.store.cells import integer, number, recorded_total, records, row_of_largest
from kvlens.store.errors import NotRecorded, UnreadableRun
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    folder = tmp_path_factory.mktemp("runs")
    write_synthetic(folder, 3, 4, 2, 10, spans=20, uid="typed-reader")
    with TraceReader.open(folder, "typed-reader") as opened:
        yield opened


def without(folder: Path, uid: str, statement: str) -> TraceReader:
    """Return a reader of a new run after a statement has changed its trace."""
    write_synthetic(folder, 2, 4, 2, 4, spans=8, uid=uid)
    trace = folder / uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute(statement)
    return TraceReader.open(folder, uid)


def test_a_span_is_a_typed_row_of_the_table(reader: TraceReader) -> None:
    rows = reader.span_rows()
    assert len(rows) == len(reader.spans()) > 0
    assert [reader.span(row.span) for row in rows] == list(rows)


def test_a_span_that_the_table_lacks_is_named(reader: TraceReader) -> None:
    with pytest.raises(UnreadableRun, match="names span 60000,"):
        reader.span(60_000)


def test_sizes_are_the_metas(reader: TraceReader) -> None:
    shape, meta = reader.kv_shape(), reader.meta
    assert (shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, meta.head_dim)
    assert shape.token_bytes == meta.token_bytes
    assert (reader.prompt_tokens(), reader.max_new()) == (meta.prompt_tokens, meta.max_new)


def test_the_prompts_tokens_are_counted_if_the_meta_lacks_their_number(tmp_path: Path) -> None:
    with without(tmp_path, "uncounted", "DELETE FROM meta WHERE key = 'prompt_tokens'") as bare:
        assert bare.meta.prompt_tokens is None
        assert bare.prompt_tokens() == int(bare.tokens()["step"].isna().sum()) > 0


@pytest.mark.parametrize("name", ["head_dim", "token_bytes", "max_new"])
def test_a_size_that_the_meta_lacks_is_named(tmp_path: Path, name: str) -> None:
    bare = without(tmp_path, "unsized", f"DELETE FROM meta WHERE key = '{name}'")
    with bare, pytest.raises(NotRecorded, match=f"does not record {name};"):
        _ = bare.max_new() if name == "max_new" else bare.kv_shape()


def test_cells_are_numbers_or_are_refused() -> None:
    frame = pd.DataFrame({"kl": [np.nan, 0.5, 2.0, 2.0], "step": [0, 1, 2, 3], "text": list("abcd")})
    assert [integer(row.step) for row in frame.itertuples()] == [0, 1, 2, 3]
    assert number(np.float32(0.5)) == 0.5
    assert np.isnan(number(frame["kl"].iloc[0]))
    worst = row_of_largest(frame, "kl")
    assert worst is not None
    assert worst["step"] == 2
    assert row_of_largest(frame.iloc[:1], "kl") is None
    assert row_of_largest(frame.iloc[:0], "kl") is None
    assert records(frame)[3] == {"kl": 2.0, "step": 3, "text": "d"}
    for cell in ("7", None, pd.Timestamp(0)):
        with pytest.raises(TypeError, match=type(cell).__name__):
            integer(cell)
        with pytest.raises(TypeError, match=type(cell).__name__):
            number(cell)


def test_a_column_without_numbers_has_no_total() -> None:
    assert recorded_total(pd.Series([None, 2.0, 3.0], dtype=float)) == 5.0
    for column in ([None, None], []):
        assert np.isnan(recorded_total(pd.Series(column, dtype=float)))
