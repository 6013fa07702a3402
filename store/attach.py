"""Opening a run's file for reading: attached read-only to a private in-memory database which can reach nothing else.

A DuckDB file can hold views and so make its reader touch other files. Three walls: only ordinary tables of the expected
names are accepted, names are resolved in the attached file only when asked for by full name, and file and network
access is off and locked before the first query.
"""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
from pydantic import ValidationError

from kvlens.meta import RunMeta
from kvlens.store import queries
from kvlens.store.errors import RunBusy, SchemaTooNew, TraceError, UnreadableRun
from kvlens.store.lease import is_held
from kvlens.store.runinfo import run_dir, sentence
from kvlens.store.schema import SCHEMA_VERSION, TABLES
from kvlens.store.versions import meta_now, relations, tables_of

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": "2",
    "memory_limit": "1GB",
    "temp_directory": "",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
}


def attach(runs_dir: Path, uid: str) -> duckdb.DuckDBPyConnection:
    """A hardened connection with the run's file attached as `run`."""
    folder = run_dir(runs_dir, uid)
    path = folder / "trace.duckdb"
    if is_held(folder):
        raise RunBusy(f"Run {uid} is still being written; wait until it ends, its progress is in run.json.")
    if not path.is_file():
        raise UnreadableRun(
            f"Run {uid} has no trace.duckdb, it ended before anything was logged; delete it and run again."
        )
    con = duckdb.connect(":memory:", config=_CONFIG)
    try:
        con.execute("ATTACH $path AS run (READ_ONLY)", {"path": str(path.resolve())})
        con.execute("SET enable_external_access = false")
        con.execute("SET lock_configuration = true")
        for statement in relations(_check_tables(con, uid)):
            con.execute(statement)
    except BaseException as error:
        con.close()
        if isinstance(error, duckdb.Error):
            raise unreadable(uid, error) from error
        raise
    return con


def unreadable(uid: str, error: BaseException) -> TraceError:
    """What a DuckDB error means to the user."""
    text = str(error)
    if "lock on file" in text or "Unique file handle" in text:
        return RunBusy(f"Run {uid} is open for writing in another process; wait until it ends.")
    if "newer version" in text or "storage version" in text.lower():
        return SchemaTooNew(f"The trace of run {uid} was written by a later DuckDB ({sentence(error)}); update kvlens.")
    return UnreadableRun(
        f"The trace of run {uid} is damaged or not a trace ({sentence(error)}); delete the run or restore the file."
    )


def _check_tables(con: duckdb.DuckDBPyConnection, uid: str) -> int | None:
    """The file's schema, once it is one this kvlens can read and all its tables are there."""
    found = {row[0] for row in con.execute(queries.TABLES).fetchall()}
    version = _version(con) if "meta" in found else None
    if version is not None and version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"Run {uid} has trace schema {version}, this kvlens reads up to {SCHEMA_VERSION}; update kvlens to open it."
        )
    missing = tables_of(version, TABLES) - found
    if missing:
        raise UnreadableRun(
            f"The trace of run {uid} lacks table {min(missing)}, so kvlens did not write it; delete the run."
        )
    return version


def _version(con: duckdb.DuckDBPyConnection) -> int | None:
    row = con.execute("SELECT value FROM run.main.meta WHERE key = 'schema_version'").fetchone()
    try:
        return int(json.loads(row[0])) if row else None
    except (ValueError, TypeError):
        return None


def read_meta(con: duckdb.DuckDBPyConnection, uid: str) -> RunMeta:
    """The meta table, of whatever schema. Raises UnreadableRun where it is not what kvlens writes."""
    try:
        found = {key: json.loads(value) for key, value in con.execute(queries.META).fetchall()}
        return RunMeta.model_validate(meta_now(found))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'sizes'}: {first['msg']}"
    except (ValueError, TypeError, RecursionError) as error:
        why = sentence(error)
    except duckdb.Error as error:
        raise unreadable(uid, error) from error
    raise UnreadableRun(f"The meta table of run {uid} is not what kvlens writes ({why}); delete the run.")
