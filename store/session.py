"""Statements on an attached run, and results as rows, frames and arrays."""

from __future__ import annotations

import threading
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from kvlens.store.attach import unreadable
from kvlens.store.errors import UnreadableRun

#: So many figures (64 MB) are made room for without asking whether the file holds them.
_FREE_CELLS = 1 << 24


class Session:
    """A hardened connection; every call has a cursor of its own, so threads may share it."""

    def __init__(self, con: duckdb.DuckDBPyConnection, uid: str) -> None:
        self._con, self.uid = con, uid
        self._lock = threading.Lock()

    def close(self) -> None:
        """Lets go of the file."""
        self._con.close()

    def _execute(self, sql: str, values: dict[str, Any]) -> duckdb.DuckDBPyConnection:
        with self._lock:
            cursor = self._con.cursor()
        return cursor.execute(sql, values)

    def rows(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        """All rows as tuples."""
        try:
            return self._execute(sql, values).fetchall()
        except duckdb.Error as error:
            raise unreadable(self.uid, error) from error

    def frame(self, sql: str, **values: Any) -> pd.DataFrame:
        """All rows as a frame; a number that is NULL is NaN."""
        try:
            results = self._execute(sql, values).fetchnumpy()
        except duckdb.Error as error:
            raise unreadable(self.uid, error) from error
        return pd.DataFrame({name: _column(values) for name, values in results.items()})

    def fill(self, size: int, sql: str, **values: Any) -> np.ndarray:
        """A flat array from (place, value) rows; places no row names stay NaN. Its size comes from what the file says
        of itself: UnreadableRun when that is far more than it has rows for."""
        try:
            results = self._execute(sql, values).fetchnumpy()
        except duckdb.Error as error:
            raise unreadable(self.uid, error) from error
        if size > max(_FREE_CELLS, len(results["place"])):
            raise UnreadableRun(
                f"The trace of run {self.uid} claims {size:,} figures per step and head and holds "
                f"{len(results['place']):,}; restore the file from a copy."
            )
        flat = np.full(size, np.nan, np.float32)
        place, value = np.asarray(results["place"]), np.asarray(results["value"])
        inside = (place >= 0) & (place < size)
        flat[place[inside]] = value[inside]
        return flat

    def batches(self, sql: str, rows: int = 65_536) -> pa.RecordBatchReader:
        """A result as a stream of Arrow batches; statements come from ``queries`` only."""
        try:
            with self._lock:
                cursor = self._con.cursor()
            return cursor.sql(sql).to_arrow_reader(rows)
        except duckdb.Error as error:
            raise unreadable(self.uid, error) from error


def _column(categorical: np.ndarray | pd.Categorical) -> np.ndarray:
    """A column of a result, its NULLs masked, as a frame has it."""
    values = np.asarray(categorical)
    kind, missing = (
        values.dtype.kind,
        np.ma.getmaskarray(categorical if isinstance(categorical, np.ndarray) else values),
    )
    if not missing.any():
        return values.astype(np.int64) if kind == "u" else values  # arithmetic on small columns does not wrap
    values = values.astype(values.dtype if kind in "fO" else np.float64)
    values[missing] = None if kind == "O" else np.nan
    return values
