"""Handing data out: CSV, Parquet and JSON of what a run holds, streamed, with units in the column names.

CSV meets spreadsheets, which run cells that begin like formulas: such text gets an apostrophe in front (`csv_cells`).
Parquet says in its metadata which run it came from. JSON is one array of objects; not recorded and not finite numbers
are null. The timeline of a run (``chrometrace``) is no table and goes as JSON alone.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from kvlens.files import discard
from kvlens.refusal import Refusal
from kvlens.rows import HEAD_COLUMNS
from kvlens.store import chrometrace, lensqueries, queries
from kvlens.store.attach import unreadable
from kvlens.store.errors import TraceError, sentence
from kvlens.store.reader import TraceReader
from kvlens.store.runinfo import config_hash
from kvlens.store.schema import UNITS

FORMATS = ("csv", "parquet", "json")
#: First characters of a formula, of half or full width, with or without spaces and characters of no width before them:
#: at the start of a cell or of a line in it.
_SIGN = r"[ \x{a0}\x{ad}\x{2000}-\x{200f}\x{2060}\x{3000}\x{feff}]*[=+\-@\x{ff1d}\x{ff0b}\x{ff0d}\x{ff20}]"
_FORMULAS = (
    (rf"([\n\r\x{{0b}}\x{{0c}}\x{{85}}\x{{2028}}\x{{2029}}])({_SIGN})", r"\1'\2"),
    (rf"^({_SIGN}|[\t\r\n])", r"'\1"),
)

_STATEMENTS = {
    "head-steps": queries.HEAD_STEPS.format(columns=", ".join(("step", "layer", "q_head", "kv_head", *HEAD_COLUMNS))),
    "kv-steps": queries.KV_STEPS,
    "steps": queries.STEPS,
    "spans": queries.SPANS,
    "decisions": queries.ALL_DECISIONS,
    "span-mass": queries.ALL_SPAN_MASS,
    "transfers": queries.ALL_TRANSFERS,
    "events": queries.ALL_EVENTS,
    "tokens": queries.TOKENS,
    "phases": queries.ALL_PHASES,
    "meta": queries.ALL_META,
    "journal": queries.ALL_JOURNAL,
    "cuts": queries.ALL_CUTS,
    "scores": queries.ALL_SCORES,
    "loss": lensqueries.LOSS,
    "oracle": lensqueries.ALL_ORACLE,
    "lost-tokens": lensqueries.ALL_LOST_TOKENS,
    "effects": lensqueries.ALL_EFFECTS,
    "span-keys": lensqueries.ALL_SPAN_KEYS,
}
EXPORTS = ("heads", *_STATEMENTS)
#: No table but a timeline, in its own JSON.
TIMELINE = "chrome-trace"


@dataclass(frozen=True)
class Field:
    """What Parquet says of a column."""

    unit: str
    meaning: str
    denominator: str


_NONE: Mapping[str, Callable[[], pa.Table]] = MappingProxyType({})
_NO_FIELDS: Mapping[str, Field] = MappingProxyType({})


def export(
    reader: TraceReader,
    text: str,
    fmt: str,
    out: Path | BinaryIO,
    mapping: Mapping[str, Callable[[], pa.Table]] = _NONE,
    fields: Mapping[str, Field] = _NO_FIELDS,
) -> None:
    """Writes one table of a run, or its timeline. `text` is one of EXPORTS or TIMELINE, `fmt` one of FORMATS, of a
    timeline json; a path is replaced only when all is written. mapping: further tables, by name, that are made of the
    run elsewhere. fields: what Parquet says of columns, by name."""
    check_names(text, fmt, (*mapping, *EXPORTS, TIMELINE))
    if text == TIMELINE:
        replace_file(out, lambda file: chrometrace.write(reader, file))
        return
    write_tables(table_pieces(reader, text, mapping), fmt, out, parquet_about(reader), fields)


def check_names(text: str, fmt: str, names: Sequence[str]) -> None:
    """Raises ValueError for a table that is not in `names`, a format that is not in FORMATS, a timeline as a table."""
    if text not in names:
        raise Refusal(
            f"{text!r} cannot be exported; choose one of {', '.join(dict.fromkeys(names))}.",
            code="unknown_table",
            table=text,
        )
    if fmt not in FORMATS:
        raise Refusal(
            f"{fmt!r} is not an export format; choose one of {', '.join(FORMATS)}.", code="unknown_format", format=fmt
        )
    if text == TIMELINE and fmt != "json":
        raise ValueError(f"{text} is written as json, not as {fmt}; say --format json.")


def write_tables(
    tables: Iterator[pa.Table],
    fmt: str,
    out: Path | BinaryIO,
    about: Mapping[str, str],
    fields: Mapping[str, Field] = _NO_FIELDS,
) -> None:
    """Writes tables of one schema, one behind the other; the first gives the schema. about: metadata of a Parquet
    file."""
    head_item = next(tables)
    writers: dict[str, Callable[[BinaryIO], None]] = {
        "csv": lambda file: _csv(head_item, tables, file),
        "parquet": lambda file: _parquet(head_item, tables, file, about, fields),
        "json": lambda file: _json(head_item, tables, file),
    }
    replace_file(out, writers[fmt])


def replace_file(out: Path | BinaryIO, write: Callable[[BinaryIO], None]) -> None:
    """Writes into an open file, or to a path, which is replaced only when all is written."""
    if not isinstance(out, Path):
        write(out)
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, out)
    except OSError as error:
        raise TraceError(f"{out} cannot be written ({sentence(error)}); choose another place.") from error
    finally:
        discard(temporary)


def table_pieces(
    reader: TraceReader, text: str, mapping: Mapping[str, Callable[[], pa.Table]] = _NONE
) -> Iterator[pa.Table]:
    """The table in pieces; the first one comes even when it is empty, for its schema."""
    if text in mapping:
        yield mapping[text]()
        return
    if text == "heads":
        yield pa.Table.from_pandas(reader.head_table(), preserve_index=False)
        return
    stream = reader.batches(_STATEMENTS[text])
    names = [UNITS.get(name, name) for name in stream.schema.names]
    yield stream.schema.empty_table().rename_columns(names)
    try:
        for batch in stream:
            yield pa.Table.from_batches([batch]).rename_columns(names)
    except (duckdb.Error, pa.ArrowException) as error:
        raise unreadable(reader.uid, error) from error


def _csv(earlier: pa.Table, rest: Iterator[pa.Table], out: BinaryIO) -> None:
    earlier = csv_cells(earlier)
    with pacsv.CSVWriter(out, earlier.schema) as writer:
        writer.write_table(earlier)
        for table in rest:
            writer.write_table(csv_cells(table))


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """A frame that a page shows, as CSV by the same rules."""
    out = io.BytesIO()
    _csv(pa.Table.from_pandas(frame, preserve_index=False), iter(()), out)
    return out.getvalue()


def csv_cells(table: pa.Table) -> pa.Table:
    """The table with every text that a spreadsheet would take for a formula marked as text."""
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            cells = table.column(index)
            for pattern, marked in _FORMULAS:
                cells = pc.replace_substring_regex(cells, pattern, marked)
            table = table.set_column(index, field.name, cells)
    return table


def parquet_about(reader: TraceReader) -> dict[str, str]:
    """What a Parquet file of one run says of it."""
    return {
        "run_uid": reader.uid,
        "method": str(reader.meta.method),
        "stand_in": reader.meta.stand_in or "",
        "dtype": reader.meta.dtype or "",
        "model": str(reader.meta.model),
        "config_sha256": config_hash(reader.meta.config),
        "trace_schema": str(reader.meta.schema_version),
    }


def _parquet(
    earlier: pa.Table, rest: Iterator[pa.Table], out: BinaryIO, about: Mapping[str, str], fields: Mapping[str, Field]
) -> None:
    described = [
        field.with_metadata(asdict(fields[field.name])) if field.name in fields else field for field in earlier.schema
    ]
    schema = pa.schema(described, {f"kvlens.{key}": value for key, value in about.items()})
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        writer.write_table(earlier.cast(schema))
        for table in rest:
            writer.write_table(table.cast(schema))


def _json(earlier: pa.Table, rest: Iterator[pa.Table], out: BinaryIO) -> None:
    out.write(b"[")
    separator = b"\n"
    for table in (earlier, *rest):
        for row in table.to_pylist():
            line = json.dumps(
                {name: _finite(value) for name, value in row.items()}, ensure_ascii=False, allow_nan=False
            )
            out.write(separator + line.encode())
            separator = b",\n"
    out.write(b"\n]\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
