"""Opening a run's file for reading: attached read-only to a private in-memory database which can reach nothing else.

The walls of ``guarded`` stand before the file is opened. Beyond them: only ordinary tables of the expected names are
accepted, and names are resolved in the attached file only when asked for by full name.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import duckdb
from pydantic import ValidationError

from kvlens.files import ordinary
from kvlens.meta import RunMeta
from kvlens.store import queries
from kvlens.store.amend import is_outstanding
from kvlens.store.columnrules import MOST_META
from kvlens.store.errors import (
    DamagedTrace,
    MemoryShort,
    RunBusy,
    SchemaTooNew,
    TraceError,
    UnmadeTrace,
    UnreadableRun,
    sentence,
)
from kvlens.store.guarded import guarded
from kvlens.store.integrity import check_columns, check_rows
from kvlens.store.runinfo import is_held, read_info, run_dir
from kvlens.store.schema import SCHEMA_VERSION, TABLES
from kvlens.store.versions import meta_now, relations, tables_of

#: More steps are no run of one prompt.
MOST_STEPS = 1 << 24
#: Of a DuckDB error: the disk, not the file, is at fault.
_DISK = re.compile(r"no space|disk quota|file too large|could not (write|truncate|sync|create)|read-only file", re.I)


def attach(runs_dir: Path, uid: str) -> duckdb.DuckDBPyConnection:
    """A hardened connection with the run's file attached as `run`."""
    folder = run_dir(runs_dir, uid)
    path = folder / "trace.duckdb"
    if is_held(folder) and not _gets_effects(folder):
        raise RunBusy(f"Run {uid} is still being written; wait until it ends, its progress is in run.json.")
    if not ordinary(path):
        raise linked(uid) if path.is_symlink() else _absent(folder)
    try:
        con = guarded(path, read_only=True)
    except duckdb.Error as error:
        raise unmade(uid) if _being_made(folder) else unreadable(uid, error) from error
    try:
        version = check_tables(con, folder)
        for statement in relations(version):
            con.execute(statement)
    except BaseException as error:
        con.close()
        if isinstance(error, duckdb.Error):
            raise unreadable(uid, error) from error
        raise
    return con


def _absent(folder: Path) -> TraceError:
    """Of a run without the file of its trace."""
    try:
        status = str(read_info(folder)["status"])
    except UnreadableRun:
        status = ""
    if status not in ("completed", "cancelled"):
        return unmade(folder.name)
    return UnreadableRun(
        f"Run {folder.name} is {status}, and its trace is gone; put trace.duckdb back from a copy, or run it again."
    )


def _gets_effects(folder: Path) -> bool:
    """The run is whole, and a copy of its trace is given effects."""
    return is_outstanding(folder) and read_info(folder)["status"] == "completed"


def unmade(uid: str) -> UnmadeTrace:
    """Of a run that died before there was anything to keep."""
    return UnmadeTrace(
        f"Run {uid} has no trace, it ended before anything was logged, so nothing is lost by it; run it again."
    )


def linked(uid: str) -> UnreadableRun:
    """Of a run whose trace is a link: it could lead to any file of this machine."""
    return UnreadableRun(
        f"The trace of run {uid} is a link, which is not followed; put the file itself into the run's folder."
    )


def _being_made(folder: Path) -> bool:
    try:
        return str(read_info(folder)["status"]) == "created"
    except UnreadableRun:
        return False


def unreadable(uid: str, error: BaseException) -> TraceError:
    """What a DuckDB error means to the user. Whatever it is, nothing of the run is given up by it."""
    text = str(error)
    if isinstance(error, duckdb.OutOfMemoryException) or "out of memory" in text.lower():
        return MemoryShort(uid, sentence(error))
    if "lock on file" in text or "Unique file handle" in text:
        return RunBusy(f"Run {uid} is open for writing in another process; wait until it ends.")
    if "newer version" in text or "storage version" in text.lower():
        return SchemaTooNew(f"The trace of run {uid} was written by a later DuckDB ({sentence(error)}); update kvlens.")
    if _DISK.search(text):
        return TraceError(
            f"The trace of run {uid} could not be written ({sentence(error)}); free disk space and try again, what it "
            f"holds is kept."
        )
    if "WAL" in text:
        return UnreadableRun(
            f"The newest part of run {uid}, its write-ahead log, is damaged ({sentence(error)}); `kvlens runs recover "
            f"{uid}` keeps what was committed before the damage."
        )
    return UnreadableRun(
        f"The trace of run {uid} is damaged or not a trace ({sentence(error)}); restore the file from a copy."
    )


def check_tables(con: duckdb.DuckDBPyConnection, folder: Path) -> int | None:
    """The schema of the file attached as `run`, once it is one this kvlens can read and all its tables are there."""
    uid = folder.name
    results = {row[0] for row in con.execute(queries.TABLES).fetchall()}
    if not results and _being_made(folder):
        raise unmade(uid)
    version = _version(con) if "meta" in results else None
    if version is not None and version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"Run {uid} has trace schema {version}, this kvlens reads up to {SCHEMA_VERSION}; update kvlens to open it."
        )
    missing = tables_of(version, TABLES) - results
    if missing:
        raise UnreadableRun(
            f"The trace of run {uid} lacks table {min(missing)}, so it is not a trace that kvlens wrote whole."
        )
    check_columns(con, uid, version)
    return version


def check_trace(con: duckdb.DuckDBPyConnection, trace: Path, meta: RunMeta, steps: int) -> None:
    """Check the integrity of the attached file's rows. Raises DamagedTrace, and UnreadableRun for a file that DuckDB
    cannot read."""
    try:
        check_rows(con, trace, meta, steps)
    except duckdb.Error as error:
        raise unreadable(trace.parent.name, error) from error


def _version(con: duckdb.DuckDBPyConnection) -> int | None:
    row = con.execute("SELECT value FROM run.main.meta WHERE key = 'schema_version'").fetchone()
    try:
        return int(read_value(row[0])) if row else None
    except (ValueError, TypeError, RecursionError):
        return None


def read_value(text: str) -> Any:
    """Return a value of the meta table. Raises ValueError for what is no JSON, and for a number that is not finite or
    has more than 64 bits."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_bounded)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _bounded(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(f"a number of {len(text)} digits is none that kvlens writes")
    return int(text)


def read_meta(con: duckdb.DuckDBPyConnection, uid: str) -> RunMeta:
    """The meta table, of whatever schema. Raises UnreadableRun where it is not what kvlens writes."""
    try:
        if long := con.execute(queries.LONG_META, {"most": MOST_META}).fetchall():
            raise DamagedTrace(uid, "meta", "value", "too_long", len(long))
        results = {key: read_value(value) for key, value in con.execute(queries.META).fetchall()}
        return RunMeta.model_validate(meta_now(results))
    except ValidationError as error:
        head_item = error.errors()[0]
        why = f"{'.'.join(map(str, head_item['loc'])) or 'sizes'}: {head_item['msg']}"
    except (ValueError, TypeError, RecursionError) as error:
        why = sentence(error)
    except duckdb.Error as error:
        raise unreadable(uid, error) from error
    raise UnreadableRun(
        f"The meta table of run {uid} is not what kvlens writes ({why}); restore the file from a copy.",
        code="meta_foreign",
    )


def stored_steps(con: duckdb.DuckDBPyConnection, uid: str) -> tuple[str, int, str | None]:
    """(status, number of steps, error) as the file says, its number checked against the rows that are there: sizes are
    taken from it, and a file could say anything."""
    try:
        state = con.execute(queries.STATE).fetchall()
        if len(state) != 1 or not isinstance(state[0][1], int):
            raise UnreadableRun(f"The trace of run {uid} does not say how far it got; restore the file from a copy.")
        (held,) = con.execute("SELECT count(*) FROM run.main.step").fetchall()[0]
    except duckdb.Error as error:
        raise unreadable(uid, error) from error
    status, steps, why = str(state[0][0]), int(state[0][1]) + 1, state[0][2]
    if not steps == held <= MOST_STEPS:
        raise UnreadableRun(
            f"The trace of run {uid} says that it has {steps:,} steps and holds {held:,}; restore the file from a copy."
        )
    return status, steps, why
