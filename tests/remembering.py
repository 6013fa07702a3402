"""A reader that asks a trace once for what it is asked again: of hundreds of spans one after the other the tests want
the same tables."""

from __future__ import annotations

from typing import Any

import duckdb
import pandas as pd

from kvlens.store.reader import TraceReader
from kvlens.store.session import Session


class Remembered(Session):
    """Results by statement and values; each caller has rows of its own."""

    def __init__(self, con: duckdb.DuckDBPyConnection, uid: str) -> None:
        super().__init__(con, uid)
        self._frames: dict[tuple[str, str], pd.DataFrame] = {}
        self._rows: dict[tuple[str, str], list[tuple[Any, ...]]] = {}

    def frame(self, sql: str, **values: Any) -> pd.DataFrame:
        asked = sql, repr(sorted(values.items()))
        if asked not in self._frames:
            self._frames[asked] = super().frame(sql, **values)
        return self._frames[asked].copy()

    def rows(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        asked = sql, repr(sorted(values.items()))
        if asked not in self._rows:
            self._rows[asked] = super().rows(sql, **values)
        return list(self._rows[asked])


class RememberingReader(TraceReader):
    """Of a run that is not written any more."""

    session = Remembered
