"""One table of many runs: each row has the columns that say of which run it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa

from kvlens.lens.condition import AFTER, question_words
from kvlens.lens.severity import outcome, outcome_table
from kvlens.store.export import EXPORTS, TIMELINE, Field, check_names, export, parquet_about, table_pieces, write_tables
from kvlens.store.reader import TraceReader
from kvlens.tables import frames
from kvlens.tables.column import ID, Column, describe
from kvlens.tables.dictionary import RECORDED, RUN
from kvlens.tables.latency import latency

PARAMETER = "param_"
"""begins the name of a column that holds a parameter"""
TABLES = ("outcome", "missed", "readers", *EXPORTS)
"""tables that can be exported, beside the timeline"""
_WHOLE = (ID, "step", "rank", "position", "prompts")
"""units of columns of whole numbers, whether or not a run lacks some"""


def export_runs(
    uids: Sequence[str], runs: Path, table: str, fmt: str, out: Path | BinaryIO, with_run: bool | None = None
) -> None:
    """Write a table of one run or of many. with_run: add the columns of `RUN` and the parameters; None: if there are
    several runs. Raises ValueError for an unknown table or format, or a timeline of several runs."""
    check_names(table, fmt, (*TABLES, TIMELINE))
    several = len(uids) > 1 if with_run is None else with_run
    if table == TIMELINE and len(uids) > 1:
        raise ValueError(f"{TIMELINE} is written for one run at a time.")
    with TraceReader.open(runs, uids[0]) as reader:
        fields = _fields(table)
        if not several:
            export(reader, table, fmt, out, _derived(reader), fields)
            return
        about = {"runs": " ".join(uids), **({} if len(uids) > 1 else parquet_about(reader))}
    write_tables(_pieces(uids, runs, table), fmt, out, about, fields)


def export_frame(frame: pd.DataFrame, fmt: str, out: Path | BinaryIO) -> None:
    """Write a frame in one of the formats of exports."""
    check_names("", fmt, ("",))
    write_tables(iter((pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(),)), fmt, out, {})


def table_of_runs(uids: Sequence[str], runs: Path, table: str) -> pd.DataFrame:
    """Return a table of many runs as a frame, with the columns of `RUN` and the parameters first. Raises ValueError for
    an unknown table."""
    check_names(table, "parquet", TABLES)
    frame = pa.concat_tables(_pieces(uids, runs, table)).to_pandas()
    return describe(frame, {**RUN, **RECORDED.get(table, {})})


def run_columns(reader: TraceReader) -> dict[str, Any]:
    """Return what says which run it is: the columns of `RUN`, then its parameters as `param_NAME`."""
    meta, came, times = reader.meta, outcome(reader).columns(), latency(reader)
    columns = {name: getattr(meta, name, None) for name in RUN}
    columns |= {
        "uid": reader.uid,
        "question_known": question_words(meta) != AFTER,
        "outcome": came["outcome"],
        "outcome_kinds": " ".join(came["outcome_kinds"]),
        "left_full_kv_at_step": came["left_full_kv_at_step"],
        "ttft_us": _recorded(times.first_token),
        "tpot_us": _recorded(times.per_token),
        "end_to_end_us": _recorded(times.end_to_end),
    }
    return columns | {f"{PARAMETER}{name}": value for name, value in meta.config.items()}


def _recorded(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _derived(reader: TraceReader) -> dict[str, Callable[[], pa.Table]]:
    """Tables that are made of a run here, as the API gives them out."""
    makers = {"steps": frames.steps, "spans": frames.spans, "missed": frames.missed, "readers": frames.readers}
    tables = {name: _maker(make, reader) for name, make in makers.items()}
    return {"outcome": lambda: outcome_table(reader), **tables}


def _maker(make: Callable[[TraceReader], pd.DataFrame], reader: TraceReader) -> Callable[[], pa.Table]:
    return lambda: pa.Table.from_pandas(make(reader), preserve_index=False).replace_schema_metadata()


def _pieces(uids: Sequence[str], runs: Path, table: str) -> Iterator[pa.Table]:
    """The table of each run in pieces, with its run's columns in front. The first piece gives the schema."""
    described: dict[str, dict[str, Any]] = {}
    for uid in uids:
        with TraceReader.open(runs, uid) as reader:
            described[uid] = run_columns(reader)
    names = list(dict.fromkeys(name for columns in described.values() for name in columns))
    units = {name: column.unit for name, column in RUN.items()}
    kinds = {name: _kind([columns.get(name) for columns in described.values()], units.get(name, "")) for name in names}
    schema: pa.Schema | None = None
    for uid in uids:
        with TraceReader.open(runs, uid) as reader:
            for piece in table_pieces(reader, table, _derived(reader)):
                run_cells = [(name, _constant(described[uid].get(name), len(piece), kinds[name])) for name in names]
                replaced = {name for name, _ in run_cells}
                stored = [(field.name, piece[field.name]) for field in piece.schema if field.name not in replaced]
                whole = pa.table(dict([*run_cells, *stored]))
                schema = _schema(whole, table) if schema is None else schema
                yield whole.cast(schema)


def _schema(piece: pa.Table, table: str) -> pa.Schema:
    """The piece's schema; a column without a value in it has the type of its unit."""
    columns = RECORDED.get(table, {})

    def typed(field: pa.Field) -> pa.Field:
        unit = columns[field.name].unit if field.name in columns else ""
        if field.name == "agrees":
            return field.with_type(pa.bool_())
        if pa.types.is_floating(field.type) and unit in _WHOLE:
            return field.with_type(pa.int64())
        if pa.types.is_null(field.type):
            return field.with_type(pa.int64() if unit in _WHOLE else pa.float64() if unit else pa.string())
        return field

    return pa.schema([typed(field) for field in piece.schema])


def _kind(values: Sequence[Any], unit: str) -> pa.DataType:
    """The type of a column of the run: numbers and flags as they are, anything else as text. A column without a value
    has the type of its unit."""
    known_values = [value for value in values if value is not None]
    if known_values and all(isinstance(value, bool) for value in known_values):
        return pa.bool_()
    if known_values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known_values):
        return pa.int64() if all(isinstance(value, int) for value in known_values) else pa.float64()
    if not known_values and unit:
        return pa.int64() if unit in _WHOLE else pa.float64()
    return pa.string()


def _constant(value: Any, rows: int, kind: pa.DataType) -> pa.Array:
    scalar = str(value) if value is not None and pa.types.is_string(kind) else value
    return pa.repeat(pa.scalar(scalar, kind), rows)


def _fields(table: str) -> dict[str, Field]:
    """What a Parquet file says of the table's columns."""
    columns: dict[str, Column] = {**RUN, **RECORDED.get(table, {})}
    return {name: Field(column.unit, column.meaning, column.denominator) for name, column in columns.items()}
