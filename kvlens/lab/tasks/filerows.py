"""Rows of benchmark files in the forms they are published in: a JSON object a line, a JSON array, Parquet, CSV; text
may be packed by gzip (.jsonl.gz)."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlens.files import RefusedFile, check_ordinary, read_bounded
from kvlens.refusal import Refusal

MOST_BYTES = 2 << 30
"""of a benchmark's file, and of the values that its rows hold in memory"""
MOST_ROWS = 1 << 20
LARGE_BATCH = 1 << 28
"""bytes that a batch of rows may unpack to"""
KINDS = {str: "a text", list: "a list", int: "a number", dict: "an object"}
Rows = list[tuple[int, dict[str, Any]]]
PACKED = ".gz"


def unpacked(path: Path) -> Path:
    """Return the path without the suffix of its packing: 'a/qa_1.jsonl' of 'a/qa_1.jsonl.gz'."""
    return path.with_suffix("") if path.suffix.lower() == PACKED else path


def read_rows(path: Path, fields: Mapping[str, type]) -> tuple[str, Rows]:
    """(how people call a row, (its number from 1, its fields) of every row that is not empty), by the file's suffix:
    .json an array, .parquet, .csv with a header, anything else a JSON object a line. A suffix .gz behind it is
    unpacked.

    Raises ValueError with one sentence that names row and field.
    """
    unit, rows = _read(path)
    entries = []
    for number, row in rows:
        place = f"{unit} {number} of '{path.name}'"
        for name, kind in fields.items():
            if name not in row:
                raise Refusal(f"{place} lacks the field '{name}'.", code="field_missing", row=number, field=name)
            if not isinstance(row[name], kind) or isinstance(row[name], bool):
                raise ValueError(f"{place}: the field '{name}' is not {KINDS[kind]}.")
        entries.append((number, row))
    if not entries:
        raise ValueError(f"'{path.name}' holds no prompts.")
    return unit, entries


def _read(path: Path) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    suffix = unpacked(path).suffix.lower()
    if suffix == ".parquet" and path == unpacked(path):
        return "row", _parquet(path)
    if suffix == ".csv":
        return "row", _csv(path)
    if suffix == ".json":
        return "entry", _array(path)
    return "line", _lines(path)


def read_text(path: Path) -> str:
    """Return the text of a file, unpacked. Raises ValueError with one sentence for a file that cannot be read, that is
    not UTF-8, or whose packing is damaged or holds more than MOST_BYTES."""
    try:
        return _bytes(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path.name}' is not UTF-8 text (byte {error.start:,} cannot be decoded).") from None
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}.") from None


def _bytes(path: Path) -> bytes:
    if unpacked(path) == path:
        return read_bounded(path, MOST_BYTES)
    check_ordinary(path, MOST_BYTES)
    try:
        with gzip.open(path) as file:
            content = file.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Refusal(f"'{path.name}' cannot be unpacked: {error}.", code="not_gzip", file=path.name) from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"'{path.name}' unpacks to more than {MOST_BYTES >> 30} GiB: split it.")
    return content


def read_table(path: Path) -> list[list[str]]:
    """Rows of a CSV file that are not empty. Raises ValueError with one sentence."""
    try:
        return [row for row in csv.reader(io.StringIO(read_text(path), newline=""), strict=True) if row]
    except csv.Error as error:
        raise ValueError(f"'{path.name}' is not CSV ({error}).") from None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in enumerate(read_text(path).split("\n"), 1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} of '{path.name}' is not JSON.") from None
        if not isinstance(line, dict):
            raise ValueError(f"line {number} of '{path.name}' is not a JSON object.")
        yield number, line


def _array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        message = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"'{path.name}' is not JSON.") from None
    if not isinstance(message, list):
        raise ValueError(f"'{path.name}' is not a JSON array.")
    for number, entry in enumerate(message, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"entry {number} of '{path.name}' is not a JSON object.")
        yield number, entry


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_ordinary(path, MOST_BYTES)
        with pq.ParquetFile(path) as file:
            _check_announced(path, file.metadata)
            yield from enumerate(_bounded_rows(path, file.iter_batches(batch_size=_batch_rows(file.metadata))), 1)
    except (pa.ArrowException, OSError) as error:
        raise Refusal(
            f"'{path.name}' cannot be read as Parquet: {str(error).partition(chr(10))[0]}.",
            code="not_parquet",
            file=path.name,
        ) from None


def _check_announced(path: Path, metadata: Any) -> None:
    """Raises RefusedFile for a Parquet file whose own metadata announce more than may be unpacked, before any of it
    is."""
    columns = (group.column(number) for group in _groups(metadata) for number in range(group.num_columns))
    size = sum(column.total_uncompressed_size for column in columns)
    if size > MOST_BYTES or metadata.num_rows > MOST_ROWS:
        raise RefusedFile(
            "too_large",
            path,
            f"announces {size:,} bytes and {metadata.num_rows:,} rows, at most {MOST_BYTES:,} and {MOST_ROWS:,} are "
            "read: give a part of it",
        )


def _batch_rows(metadata: Any) -> int:
    """Return the rows to unpack at once. A value that is stored once may be that of every row: so many rows that each
    could hold the largest column without exceeding LARGE_BATCH."""
    largest = max(
        (g.column(n).total_uncompressed_size for g in _groups(metadata) for n in range(g.num_columns)), default=0
    )
    return max(1, min(16, LARGE_BATCH // max(1, largest)))


def _groups(metadata: Any) -> Iterator[Any]:
    return map(metadata.row_group, range(metadata.num_row_groups))


def _bounded_rows(path: Path, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The rows of Arrow batches. Raises RefusedFile when they are more than MOST_ROWS or unpack to more than
    MOST_BYTES."""
    size = count = 0
    for batch in batches:
        size, count = size + batch.nbytes, count + len(batch)
        if size > MOST_BYTES or count > MOST_ROWS:
            raise RefusedFile(
                "too_large", path, f"unpacks to more than {MOST_BYTES:,} bytes or {MOST_ROWS:,} rows: give a part of it"
            )
        yield from batch.to_pylist()


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    header, *rows = read_table(path) or [[]]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} of '{path.name}' has {len(row)} columns, its header {len(header)}.")
        yield number, dict(zip(header, row, strict=True))
