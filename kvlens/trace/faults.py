"""What can be wrong with a trace of the open format: faults with a code and typed values, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlens.store.errors import TraceError
from kvlens.text.plaintext import terminal

SHOWN = 80
"""characters of a value that a sentence quotes"""
CODES = {
    "trace_missing": "there is no trace.json in the folder; name the folder that the engine wrote",
    "head_invalid": "trace.json is not what docs/trace-format.md describes; mend the key",
    "trace_too_new": "a later version of the format wrote the trace; update kvlens",
    "trace_too_large": "the trace exceeds a limit of kvlens; record fewer steps, layers or tables",
    "trace_unreadable": "the file cannot be decoded; write it again",
    "file_missing": "trace.json names a file that is not an ordinary file in the folder; put the file there",
    "missing_table": "a required table has no file; log the table",
    "unknown_table": "the format has no table of this name; correct the name or remove the table",
    "missing_column": "a required column is missing; log the column",
    "unknown_column": "the table has no column of this name; correct the name, or begin it with x_",
    "wrong_type": "the column has another type; write the type of docs/trace-format.md",
    "null": "the row has no value where one is required; log a value",
    "not_finite": "the number is not finite; write NULL where a number was not recorded",
    "out_of_range": "the value is outside its range; correct the value, or the sizes in trace.json",
    "too_long": "the text is too long; shorten it",
    "unknown_word": "the format does not know the word; use a word of the rule",
    "unequal_lists": "two lists of the row have different lengths; log them together",
    "duplicate": "two rows, or two items of a list, have the same key; log each once",
    "misplaced": "the token is not at its place; log the prompt first, then one token per step",
    "reversed": "the end is before the start; swap them",
    "unknown_span": "the table of spans has no span of this number; log the span",
    "incomplete": "rows of a step, layer or head are missing; log every one",
    "mass_sum": "the masses of the row do not add up to 1; log every role that the method attends",
    "several_values": "the column has one value in the whole table; log one value in all rows",
    "wrong_sum": "asked is not granted + refused + missed; correct the counts",
}
"""code -> what is wrong, and the remedy"""


@dataclass(frozen=True)
class Fault:
    """One broken rule of a trace. None: the fault has no such place."""

    code: str
    table: str | None = None
    column: str | None = None
    file: str | None = None
    row: int | None = None
    """the first row of the file that breaks the rule, counted from 0"""
    rule: str | None = None
    value: str | None = None
    rows: int | None = None
    """how many rows of the table break the rule"""

    @property
    def sentence(self) -> str:
        """The fault in one sentence that begins with its code."""
        where = [f"table {self.table}"] if self.table else []
        where += [f"file {self.file}"] if self.file else []
        where += [f"row {self.row}"] if self.row is not None else []
        where += [f"column {self.column}"] if self.column else []
        facts = [f"the rule is {self.rule}"] if self.rule else []
        facts += [f"the value is {self.value}"] if self.value is not None else []
        facts += [f"{self.rows:,} rows break it"] if self.rows is not None and self.rows > 1 else []
        place = terminal(", ".join(where))
        problem, remedy = CODES[self.code].split("; ", 1)
        text = f"{problem} ({terminal('; '.join(facts))})" if facts else problem
        return f"{self.code}: {place + ': ' if place else ''}{text}; {remedy}."


class BadTrace(TraceError):
    """A trace of the open format breaks rules, so nothing of it was stored."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        """faults: one or more; the first gives the error its code."""
        self.faults = tuple(faults)
        self.code = self.faults[0].code
        self.values: dict[str, Any] = asdict(self.faults[0]) | {"faults": len(self.faults)}
        more = f" {len(faults) - 1} more faults: kvlens check-trace lists all." if len(faults) > 1 else ""
        super().__init__(self.faults[0].sentence + more)


def quote(value: object) -> str:
    """Return a value as a sentence quotes it: short, and without control characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
