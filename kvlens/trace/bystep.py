"""Rows of a checked table, by the step that logged them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvlens.trace.cells import numbers

BETWEEN = -1
"""the step of rows at the end of prefill"""


class RowsByStep:
    """A table whose rows are ordered by step, the tokens by position; rows of one step keep their order."""

    def __init__(self, name: str, table: pa.Table) -> None:
        self.table = table = _sorted(name, table)
        column = "born_step" if name == "span" else "step"
        steps = numbers(table[column]) if column in table.column_names else np.full(table.num_rows, BETWEEN)
        self._steps = np.where(np.isnan(steps), BETWEEN, steps)
        self._widths: dict[str, int] = {}

    def at(self, step: int) -> pa.Table:
        """Return the rows of a step."""
        start, stop = np.searchsorted(self._steps, [step, step + 1])
        return self.table.slice(start, stop - start)

    def width(self, column: str) -> int:
        """Return the length of the longest list of a column."""
        if column not in self._widths:
            lengths = numbers(pc.list_value_length(self.table[column]))
            self._widths[column] = int(np.nanmax(lengths, initial=0))
        return self._widths[column]


def _sorted(name: str, table: pa.Table) -> pa.Table:
    """Return the rows ordered by step, or the tokens by position; rows of one step keep their order."""
    column = {"token": "pos", "span": "born_step"}.get(name, "step")
    if column not in table.column_names:
        return table
    values = np.nan_to_num(numbers(table[column]), nan=BETWEEN)
    return table.take(pa.array(np.argsort(values, kind="stable")))
