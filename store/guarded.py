"""A run's DuckDB file, opened inside walls: for reading and for finishing alike.

A DuckDB file can hold views and so make its reader touch other files, and a file of another kind makes DuckDB look for
an extension that opens it. So before the file is opened: only it and its log may be touched, no extension is loaded or
fetched, nothing else is attached, and none of this can be switched on again.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": "2",
    "memory_limit": "1GB",
    "temp_directory": "",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
}
#: The file, its write-ahead log, and the names DuckDB gives to logs while it checkpoints and replays.
_BESIDE = ("", ".wal", ".wal.checkpoint", ".wal.recovery", ".tmp")


def guarded(path: Path, read_only: bool, **config: str) -> duckdb.DuckDBPyConnection:
    """A private in-memory database with the file attached as `run`. `config`: DuckDB's settings over those above.

    Raises duckdb.Error when the file cannot be opened; it is attached as a DuckDB file or not at all."""
    con = duckdb.connect(":memory:", config=_CONFIG | config)
    try:
        allowed = ", ".join(quoted(f"{path.absolute()}{suffix}") for suffix in _BESIDE)
        con.execute(f"SET allowed_paths = [{allowed}]")
        con.execute("SET enable_external_access = false")
        con.execute("SET lock_configuration = true")
        how = "TYPE duckdb, READ_ONLY" if read_only else "TYPE duckdb"
        con.execute(f"ATTACH {quoted(str(path.absolute()))} AS run ({how})")
    except BaseException:
        con.close()
        raise
    return con


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
