"""Typed access to the cells and rows of the reader's frames, whose types pandas does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd  # a run imports this module and need not wait for pandas


def integer(cell: object) -> int:
    """Return the whole number in a cell. Raises TypeError if the cell holds no number, ValueError if it is NaN."""
    if isinstance(cell, int | float | np.integer | np.floating):
        return int(cell)
    raise TypeError(f"A cell of a trace's table holds {type(cell).__name__} in place of a number.")


def number(cell: object) -> float:
    """Return the number in a cell, NaN included. Raises TypeError if the cell holds no number."""
    if isinstance(cell, int | float | np.integer | np.floating):
        return float(cell)
    raise TypeError(f"A cell of a trace's table holds {type(cell).__name__} in place of a number.")


def records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Return each row as a dictionary from column names to cells."""
    names, columns = [str(name) for name in frame.columns], [frame[name].tolist() for name in frame.columns]
    return [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def row_of_largest(frame: pd.DataFrame, column: str) -> pd.Series | None:
    """Return the first row with the largest number in a column. None if the column holds no number."""
    numbers = frame[column].to_numpy(np.float64, na_value=np.nan)
    return None if np.isnan(numbers).all() else frame.iloc[int(np.nanargmax(numbers))]


def recorded_total(column: pd.Series) -> float:
    """Return the sum of the numbers in a column; NaN if none of them was recorded."""
    return float(column.sum(min_count=1))
