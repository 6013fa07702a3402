"""A run as the pages read it: what is written in it is text to be looked at, so unseen characters are named, and what a
page asked for once is not asked of the file again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import duckdb
import pandas as pd

from kvlens.store.reader import TraceReader
from kvlens.store.session import Session
from kvlens.text.plaintext import visible

KEPT_BYTES = 1 << 25
"""of a run's results; one of more than a quarter of it is not kept. Cubes, read by `fill`, never are."""
_Rows = list[tuple[Any, ...]]
_Found = TypeVar("_Found")


def shown_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with every text in it as `visible` has it."""
    for name in frame.columns:
        if pd.api.types.is_string_dtype(frame[name].dtype) or frame[name].dtype == object:
            frame[name] = [visible(item) if isinstance(item, str) else item for item in frame[name]]
    return frame


class PageSession(Session):
    """Statements whose results are shown. Those used last stay in memory: a page asks for the tokens of a run in eight
    places, and the file does not change while it is open (a changed file is opened anew, by its time)."""

    def __init__(self, con: duckdb.DuckDBPyConnection, uid: str) -> None:
        super().__init__(con, uid)
        self._kept: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._kept_bytes = 0
        self._keeping = threading.Lock()

    def frame(self, sql: str, **values: Any) -> pd.DataFrame:
        """As Session.frame; a copy of which only what is written to is copied."""
        found = self._once(
            "frame", sql, values, lambda: shown_frame(super(PageSession, self).frame(sql, **values)), _frame_bytes
        )
        return found.copy(deep=False)

    def rows(self, sql: str, **values: Any) -> _Rows:
        """As Session.rows."""
        return list(self._once("rows", sql, values, lambda: super(PageSession, self).rows(sql, **values), _rows_bytes))

    def _once(
        self, kind: str, sql: str, values: dict[str, Any], ask: Callable[[], _Found], size: Callable[[_Found], int]
    ) -> _Found:
        key = (kind, sql, *sorted(values.items()))
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
                found: _Found = self._kept[key][0]
                return found
        found = ask()
        taken = size(found)
        with self._keeping:
            if taken <= KEPT_BYTES // 4 and key not in self._kept:
                self._kept[key] = found, taken
                self._kept_bytes += taken
                while self._kept_bytes > KEPT_BYTES:
                    self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        return found


def _frame_bytes(frame: pd.DataFrame) -> int:
    return int(frame.memory_usage(deep=True).sum())


def _rows_bytes(rows: Iterable[tuple[Any, ...]]) -> int:
    """About: what Python takes for figures, and for lists of them."""
    return 64 + sum(64 + 32 * sum(len(cell) if isinstance(cell, list) else 1 for cell in row) for row in rows)


class PageReader(TraceReader):
    """A TraceReader whose tables are shown and not worked with."""

    session = PageSession
