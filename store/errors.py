"""What can go wrong with a trace, each with one sentence: what is wrong and what to do about it."""

from __future__ import annotations


class TraceError(Exception):
    """A trace cannot be written or read. ``str(error)`` is one sentence meant for the user."""


class RunNotFound(TraceError):
    """There is no run of this id in the runs folder, or the id is not one."""


class SchemaTooNew(TraceError):
    """The file was written by a later kvlens than this one."""


class UnreadableRun(TraceError):
    """The run's files are missing, damaged or not what kvlens wrote."""


class RunBusy(TraceError):
    """Another process holds the run's lease, so this one may neither write nor read it."""


class NotRecorded(TraceError):
    """The trace can be read and lacks a value that the reader was asked for."""
