"""A session that asks its file for a result once and keeps it, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import duckdb
import pandas as pd

from kvlens.store.session import Session

KEPT_BYTES = 1 << 25
"""of a run's results; one of more than a quarter of it is not kept. Cubes, read by `fill`, never are."""
_Rows = list[tuple[Any, ...]]
_Found = TypeVar("_Found")


class KeepingSession(Session):
    """Results used last stay in memory, for a file that does not change while it is open. Threads may share it."""

    def __init__(self, con: duckdb.DuckDBPyConnection, uid: str) -> None:
        super().__init__(con, uid)
        self._kept: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._kept_bytes = 0
        self._keeping = threading.Lock()

    def asked_frame(self, sql: str, **values: Any) -> pd.DataFrame:
        """What the file answers."""
        return super().frame(sql, **values)

    def frame(self, sql: str, **values: Any) -> pd.DataFrame:
        """As Session.frame; a copy of which only what is written to is copied."""
        return self._once("frame", sql, values, self.asked_frame, _frame_bytes).copy(deep=False)

    def rows(self, sql: str, **values: Any) -> _Rows:
        """As Session.rows."""
        answers: _Rows = self._once("rows", sql, values, super().rows, _rows_bytes)
        return list(answers)

    def _once(
        self, kind: str, sql: str, values: dict[str, Any], ask: Callable[..., _Found], size: Callable[[_Found], int]
    ) -> _Found:
        if any(isinstance(value, list) for value in values.values()):  # a list rarely comes twice
            return ask(sql, **values)
        key = (kind, sql, *sorted(values.items()))
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
                results: _Found = self._kept[key][0]
                return results
        results = ask(sql, **values)
        used = size(results)
        with self._keeping:
            if used <= KEPT_BYTES // 4 and key not in self._kept:
                self._kept[key] = results, used
                self._kept_bytes += used
                while self._kept_bytes > KEPT_BYTES:
                    self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        return results


def _frame_bytes(frame: pd.DataFrame) -> int:
    """About: of Python's own objects, lists among them, the frame counts pointers alone."""
    columns = [frame[name].array for name in frame.columns]
    return 64 + sum(8 * column.nbytes if column.dtype == object else column.nbytes for column in columns)


def _rows_bytes(rows: _Rows) -> int:
    """Estimate the bytes that rows of numbers and lists use as Python objects, from about 100 of the rows."""
    sample = rows[:: max(1, len(rows) // 100)]
    used = sum(64 + 32 * sum(len(cell) if isinstance(cell, list) else 1 for cell in row) for row in sample)
    return 64 + used * len(rows) // max(1, len(sample))
