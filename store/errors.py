"""What can go wrong with a trace, each with one sentence: what is wrong and what to do about it."""

from __future__ import annotations

from kvlens.refusal import Coded


class TraceError(Coded):
    """A trace cannot be written or read. ``str(error)`` is one sentence meant for the user."""


class RunNotFound(TraceError):
    """There is no run of this id in the runs folder, or the id is not one."""


class SchemaTooNew(TraceError):
    """The file was written by a later kvlens than this one."""

    code = "run_too_new"


class UnreadableRun(TraceError):
    """The run's files are missing, damaged or not what kvlens wrote."""

    code = "run_unreadable"


class UnmadeTrace(UnreadableRun):
    """The run ended before it wrote a trace."""

    code = "run_unmade"


class DamagedTrace(UnreadableRun):
    """A table of the trace holds what kvlens does not write, so no figure of the run can be trusted."""

    code = "trace_damaged"

    def __init__(self, uid: str, table: str, column: str, fault: str, rows: int) -> None:
        """column: '' for the table as a whole. fault: a key of FAULTS. rows: how many have the fault, 0 where rows are
        not counted."""
        where = f"{table}.{column}" if column else table
        count = f" ({rows:,} row{'s' if rows > 1 else ''})" if rows else ""
        super().__init__(
            f"The trace of run {uid} is damaged ({self.code}): {where} {FAULTS[fault]}{count}; restore the file from a "
            f"copy."
        )
        self.values = {"uid": uid, "table": table, "column": column, "fault": fault, "rows": rows}


FAULTS = {
    "missing_column": "is missing",
    "extra_column": "is no column of the trace format",
    "wrong_type": "has another type than the trace format",
    "null": "has no value where one is required",
    "not_finite": "has a value that is not a finite number",
    "out_of_range": "has a value outside its range",
    "too_long": "has a text that is too long",
    "unknown_word": "has a word that the trace format does not know",
    "reversed": "has an end before its start",
    "unequal_lists": "has a list of another length than its neighbour",
    "misplaced": "is not at its place in the prompt or behind it",
    "unknown_span": "names a span that the table of spans lacks",
    "wrong_group": "is not the KV head of its query head",
    "duplicate": "has two rows of one key",
    "incomplete": "lacks rows of a step, layer or head",
}
"""faults of a table: what the sentence says of each"""


class MemoryShort(TraceError):
    """DuckDB lacks memory for a statement. The file is not at fault."""

    code = "memory_short"

    def __init__(self, uid: str, reason: str) -> None:
        super().__init__(
            f"{self.code}: there is too little memory for the trace of run {uid} ({reason}); close other programs, or "
            "record a shorter run or less of it (--trace heads), and try again, what the trace holds is kept."
        )
        self.values = {"uid": uid}


class RunBusy(TraceError):
    """Another process holds the run's lease, so this one may neither write nor read it."""


class NotRecorded(TraceError):
    """The trace can be read and lacks a value that the reader was asked for."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def sentence(error: BaseException) -> str:
    """The first line of a foreign error, short enough to stand inside one sentence of ours."""
    if isinstance(error, TraceError):
        return str(error).rstrip(".")
    return first_line(error)[:200]
