"""The files of a trace of the open format, opened with suspicion: ordinary files of a bounded size, decoded in pieces
that are counted. A file can still decode to more than it announces; `limited.py` decodes in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from kvlens.files import PLAIN, ordinary
from kvlens.store import queries
from kvlens.store.errors import sentence
from kvlens.store.guarded import guarded
from kvlens.trace.columns import TEXT
from kvlens.trace.faults import BadTrace, Fault, quote
from kvlens.trace.head import Head, read_head
from kvlens.trace.tables import TABLES

MOST_FILES = 20_000
"""Parquet files of one trace"""
MOST_BYTES = 2 << 30
"""bytes of all files together, of one table that is decoded, and of what its file announces"""
MOST_ROWS = 1 << 26
"""rows of one table"""
MOST_COLUMNS = 256
_BATCH = 16_384
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}")
_THRIFT = 16 << 20


@dataclass(frozen=True)
class Loaded:
    """A table as its files hold it: declared columns only."""

    table: pa.Table
    files: tuple[tuple[str, int], ...]
    """(file, rows), in order"""
    unknown: tuple[str, ...]
    """columns that the format does not have"""

    def place(self, row: int) -> tuple[str, int]:
        """Return the file of a row of the table, and the row in that file."""
        for name, rows in self.files:
            if row < rows:
                return name, row
            row -= rows
        return self.files[-1][0] if self.files else "", row


class Source:
    """A trace's folder. Raises BadTrace for what cannot be opened or decoded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head: Head = read_head(folder)
        self._names = self._files()

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables that the trace holds."""
        return tuple(self._names)

    def read(self, name: str) -> Loaded:
        """Read a table of the format."""
        pieces: list[pa.Table] = []
        files: list[tuple[str, int]] = []
        unknown: dict[str, None] = {}
        size = 0
        for file in self._names[name]:
            rows, part = 0, []
            with self._opened(name, file) as (schema, batches):
                columns = TABLES[name].columns
                unknown |= dict.fromkeys(field for field in schema.names if field not in columns and field[:2] != "x_")
                part.append(pa.table({f.name: pa.array([], f.type) for f in schema if f.name in columns}))
                for batch in batches:
                    rows, size = rows + batch.num_rows, size + batch.nbytes
                    if size > MOST_BYTES or sum(count for _, count in files) + rows > MOST_ROWS:
                        raise self._too_large(name, file, f"{max(size, 0):,} bytes, {rows:,} rows")
                    part.append(pa.Table.from_batches([batch]))
            files.append((file, rows))
            pieces.append(self._joined(name, file, part))
        return Loaded(self._joined(name, files[-1][0], pieces), tuple(files), tuple(unknown))

    def _files(self) -> dict[str, list[str]]:
        """Table -> its files, each an ordinary file of the folder."""
        named = dict(self.head.tables)
        if self.head.database is not None:
            named = {"": [self.head.database]}
        names = [file for files in named.values() for file in files]
        if len(names) > MOST_FILES:
            raise self._too_large(None, "trace.json", f"{len(names):,} files")
        size = 0
        for table, files in named.items():
            for file in files:
                path = self.folder / file
                if not _NAME.fullmatch(file) or not ordinary(path):
                    raise BadTrace([Fault("file_missing", table or None, file=quote(file))])
                size += path.stat().st_size
                if size > MOST_BYTES:
                    raise self._too_large(table or None, file, f"{size:,} bytes")
        if self.head.database is not None:
            return {table: [self.head.database] for table in self._database_tables(self.head.database)}
        return {table: files for table, files in named.items() if files}

    def _database_tables(self, file: str) -> list[str]:
        try:
            with guarded(self.folder / file, read_only=True) as con:
                if con.execute(queries.MORE_THAN_TABLES).fetchall():
                    raise BadTrace([Fault("trace_unreadable", None, None, file, rule="tables alone, no view or macro")])
                return sorted(row[0] for row in con.execute(queries.TABLES).fetchall())
        except duckdb.Error as error:
            raise self._unreadable(None, file, error) from error

    @contextmanager
    def _opened(self, name: str, file: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """The schema of a table in a file, and its rows in pieces."""
        try:
            if self.head.database is None:
                with os.fdopen(os.open(self.folder / file, os.O_RDONLY | PLAIN), "rb") as handle:
                    yield self._parquet(name, file, handle)
            else:
                with guarded(self.folder / file, read_only=True) as con:
                    yield self._database(con, name)
        except (MemoryError, duckdb.OutOfMemoryException) as error:
            raise self._too_large(name, file, sentence(error)) from error
        except (duckdb.Error, pa.ArrowException, OSError, OverflowError) as error:
            raise self._unreadable(name, file, error) from error

    def _parquet(self, name: str, file: str, handle: BinaryIO) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        columns = TABLES[name].columns
        limits: dict[str, Any] = {
            "thrift_string_size_limit": _THRIFT,
            "thrift_container_size_limit": _THRIFT,
            "pre_buffer": False,
        }
        parquet = pq.ParquetFile(handle, **limits)
        about = parquet.metadata
        announced = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
        if about.num_rows > MOST_ROWS or announced > MOST_BYTES or about.num_columns > MOST_COLUMNS:
            facts = f"{about.num_rows:,} rows, {about.num_columns:,} columns, {announced:,} bytes"
            raise self._too_large(name, file, facts)
        schema = parquet.schema_arrow
        if len(set(schema.names)) != len(schema.names):
            raise BadTrace([Fault("trace_unreadable", name, None, file, rule="one column of each name")])
        declared = [column for column in schema.names if column in columns]
        texts = [column for column in declared if columns[column].kind == TEXT]  # a text that repeats is decoded once
        parquet = pq.ParquetFile(handle, read_dictionary=texts, **limits)
        return parquet.schema_arrow, parquet.iter_batches(_BATCH, columns=declared, use_threads=False)

    def _database(self, con: duckdb.DuckDBPyConnection, name: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        rows = con.execute(
            "SELECT column_name FROM duckdb_columns() WHERE database_name = 'run' AND schema_name = 'main' "
            "AND table_name = ? ORDER BY column_index",
            [name],
        ).fetchall()
        names = [row[0] for row in rows]
        declared = [column for column in names if column in TABLES[name].columns]
        if not declared:
            return pa.schema([]), iter(())
        listed = ", ".join(f'"{column}"' for column in declared)
        reader = con.sql(f'SELECT {listed} FROM run.main."{name}"').to_arrow_reader(_BATCH)
        fields = [
            reader.schema.field(column) if column in declared else pa.field(column, pa.null()) for column in names
        ]
        return pa.schema(fields), reader

    def _joined(self, name: str, file: str, pieces: list[pa.Table]) -> pa.Table:
        try:
            return pa.concat_tables(pieces, promote_options="permissive")
        except pa.ArrowException as error:
            raise BadTrace([Fault("wrong_type", name, None, file, value=quote(sentence(error)))]) from None

    @staticmethod
    def _too_large(table: str | None, file: str, facts: str) -> BadTrace:
        rule = f"at most {MOST_BYTES:,} bytes, {MOST_ROWS:,} rows and {MOST_FILES:,} files"
        return BadTrace([Fault("trace_too_large", table, None, file, rule=rule, value=facts)])

    @staticmethod
    def _unreadable(table: str | None, file: str, error: BaseException) -> BadTrace:
        return BadTrace([Fault("trace_unreadable", table, None, file, value=quote(sentence(error)))])
