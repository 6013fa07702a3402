"""A damaged write-ahead log: what was committed before the damage is kept.

DuckDB replays a log entry by entry and stops with an error at the first whose checksum is wrong; a log that merely ends
early it takes for one that was being written. So the longest beginning of the log that can be replayed is looked for by
halving, on a copy beside a second name of the trace, which nothing here changes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import duckdb

from kvlens.files import FOLDER_MODE, ordinary
from kvlens.store.guarded import guarded

#: Where a damaged log stays, for whoever can make more of it.
KEPT = "trace.duckdb.wal.damaged"
_SCRATCH = ".recover"


def clear(folder: Path) -> None:
    """Removes what a recovery that was killed left."""
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)


def replayable(trace: Path) -> bool:
    """Whether the trace opens with its log. Raises duckdb.Error for what is not the log's fault."""
    try:
        guarded(trace, read_only=True).close()
    except duckdb.Error as error:
        if "WAL" not in str(error):
            raise
        return False
    return True


def mend(trace: Path) -> int:
    """Cuts the log of `trace` before its first damaged entry; the whole of it stays beside it under the name KEPT.
    Returns the number of bytes given up, 0 where nothing was damaged. Killed at any moment, the trace has its log as it
    was or as it becomes. Raises OSError when there is no room for the copies, duckdb.Error for a damaged trace."""
    wal = trace.with_name(f"{trace.name}.wal")
    if not ordinary(wal) or replayable(trace):
        return 0
    clear(trace.parent)
    scratch = trace.parent / _SCRATCH
    scratch.mkdir(FOLDER_MODE)
    try:
        link, log = scratch / trace.name, scratch / wal.name
        _same(trace, link)
        size = _longest(link, log, wal)
        keep(trace)
        _copy(wal, log, size)
        os.replace(log, wal)
    finally:
        clear(trace.parent)
    return trace.with_name(KEPT).stat().st_size - size


def keep(trace: Path) -> None:
    """Puts a copy of the log beside it, to outlast what DuckDB does with the log when the trace is opened for
    writing."""
    wal = trace.with_name(f"{trace.name}.wal")
    half = trace.with_name(f".{KEPT}")
    half.unlink(missing_ok=True)
    _copy(wal, half, wal.stat().st_size)
    os.replace(half, trace.with_name(KEPT))


def _longest(link: Path, log: Path, wal: Path) -> int:
    """Bytes of the longest beginning of `wal` with which `link` opens."""
    most = wal.stat().st_size
    _copy(wal, log, most)
    good, bad = 0, most
    while bad - good > 1:
        middle = (good + bad) // 2
        if log.stat().st_size < middle:
            _copy(wal, log, middle)
        else:
            os.truncate(log, middle)
        if replayable(link):
            good = middle
        else:
            bad = middle
    return good


def _same(trace: Path, link: Path) -> None:
    """The trace under another name: DuckDB looks for the log beside it, and goes by where a symbolic link leads."""
    try:
        os.link(trace, link)
    except OSError:  # a file system without hard links
        shutil.copyfile(trace, link)


def _copy(source: Path, target: Path, size: int) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        remaining = size
        while remaining and (piece := old.read(min(remaining, 1 << 20))):
            remaining -= new.write(piece)
        new.flush()
        os.fsync(new.fileno())
