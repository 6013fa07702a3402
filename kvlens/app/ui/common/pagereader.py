"""A run as the pages read it: what is written in it is text to be looked at, so unseen characters are named, and what a
page asked for once is not asked of the file again."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlens.app.data.keeping import KeepingSession
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import visible


def shown_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with every text in it as `visible` has it."""
    for name in frame.columns:
        if pd.api.types.is_string_dtype(frame[name].dtype) or frame[name].dtype == object:
            shown: dict[str, str] = {}  # columns of thousands of rows have a few words
            frame[name] = [_shown(item, shown) if isinstance(item, str) else item for item in frame[name]]
    return frame


def _shown(text: str, shown: dict[str, str]) -> str:
    if text not in shown:
        shown[text] = visible(text)
    return shown[text]


class PageSession(KeepingSession):
    """Statements whose results are shown. A page asks for the tokens of a run in eight places, and a file that has
    changed is opened anew, by its time."""

    def asked_frame(self, sql: str, **values: Any) -> pd.DataFrame:
        return shown_frame(super().asked_frame(sql, **values))


class PageReader(TraceReader):
    """A TraceReader whose tables are shown and not worked with."""

    session = PageSession
