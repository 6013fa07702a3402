"""A column of a recorded table, and how it is written beside a frame and in a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    unit: str
    """"" for names, texts and flags"""
    meaning: str
    denominator: str = ""
    """what a count or share is a part of, or what a mean is over; a column's name where a column holds it"""


ID, COUNT, SHARE, BYTES, US, NATS = "id", "count", "share 0..1", "bytes", "µs", "nats"


def describe(frame: pd.DataFrame, columns: Mapping[str, Column]) -> pd.DataFrame:
    """Return the frame with `attrs["units"]`, `attrs["columns"]` and `attrs["denominators"]`: column -> unit, meaning
    and what it is a part of. Columns without an entry have none."""
    documented = [name for name in frame.columns if name in columns]
    frame.attrs["units"] = {name: columns[name].unit for name in documented}
    frame.attrs["columns"] = {name: columns[name].meaning for name in documented}
    frame.attrs["denominators"] = {name: columns[name].denominator for name in documented if columns[name].denominator}
    return frame


def row_of(name: str, column: Column) -> str:
    """Return a column's line of a Markdown table."""
    part = f"; denominator: {column.denominator}" if column.denominator else ""
    return f"| `{name}` | {column.unit or '-'} | {column.meaning}{part} |".replace("||", "\\|\\|")
