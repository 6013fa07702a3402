"""Referential integrity of a trace, checked once when its file is opened: readers trust what they read afterwards.

Three statements: the columns against the schema, the rows that break a rule of ``columnrules``, the keys that two rows
have. A file that passed is not checked again while it is unchanged.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NoReturn

import duckdb

from kvlens.meta import RunMeta
from kvlens.store.columnrules import KEYS, Column, Rule, bare, declared, packed, rules, sound
from kvlens.store.errors import DamagedTrace
from kvlens.store.sizes import Sizes
from kvlens.store.versions import source

_KNOWN = 4096
"""files whose soundness is remembered"""
_COLUMNS = (
    "SELECT table_name, column_name, data_type FROM duckdb_columns() "
    "WHERE database_name = 'run' AND schema_name = 'main'"
)
Identity = tuple[int, ...]


class SoundFiles:
    """Identities of files that passed. May be used from several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[Identity, None] = OrderedDict()
        self._lock = threading.Lock()

    def knows(self, identity: Identity) -> bool:
        """Return True if the file passed before and is unchanged."""
        with self._lock:
            if identity not in self._known:
                return False
            self._known.move_to_end(identity)
            return True

    def add(self, identity: Identity) -> None:
        """Remember a file that passed; forget the one used longest ago above a bound."""
        with self._lock:
            self._known[identity] = None
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)


_SOUND = SoundFiles()


def identity_of(trace: Path) -> Identity:
    """Device, inode, size and times in ns of a trace and of its write-ahead log. Any write changes it."""
    parts: list[int] = []
    for path in (trace, trace.with_name(f"{trace.name}.wal")):
        try:
            about = os.lstat(path)
        except OSError:
            parts.append(-1)
        else:
            parts += [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    return tuple(parts)


def check_columns(con: duckdb.DuckDBPyConnection, uid: str, version: int | None) -> None:
    """Compare the tables of the file attached as `run` with its schema. Raises DamagedTrace."""
    stored: dict[str, dict[str, str]] = {}
    for table, name, kind in con.execute(_COLUMNS).fetchall():
        stored.setdefault(table, {})[name] = bare(kind)
    for table, columns in declared(version).items():
        held = stored.get(table, {})
        for name, column in columns.items():
            if name not in held:
                raise DamagedTrace(uid, table, name, "missing_column", 0)
            if held[name] != column.kind:
                raise DamagedTrace(uid, table, name, "wrong_type", 0)
        for name in held.keys() - columns.keys():
            raise DamagedTrace(uid, table, name, "extra_column", 0)


def check_rows(con: duckdb.DuckDBPyConnection, trace: Path, meta: RunMeta, steps: int) -> None:
    """Check every table of the file attached as `run`, unless the file passed before. Raises DamagedTrace for the first
    fault, and duckdb.Error."""
    identity = identity_of(trace)
    if _SOUND.knows(identity):
        return
    uid, columns = trace.parent.name, declared(None)
    prompt, positions = con.execute("SELECT count(*) FILTER (step IS NULL), count(*) FROM run.main.token").fetchall()[0]
    spans, last = con.execute("SELECT count(*), coalesce(max(span), -1) FROM run.main.span").fetchall()[0]
    sizes = Sizes(steps, meta.layers, meta.q_heads, meta.kv_heads, prompt, positions, last + 1)
    table_rules = {table: list(rules(table, columns_of_table, sizes)) for table, columns_of_table in columns.items()}
    counts = con.execute(
        " UNION ALL ".join(_counted(table, own_rules) for table, own_rules in table_rules.items())
    ).fetchall()
    for table, _, damaged in counts:
        if damaged:
            _name_fault(con, uid, table, table_rules[table])
    held = {table: rows for table, rows, _ in counts}
    _check_keys(con, uid, held, sizes)
    if spans != last + 1:
        _check_spans(con, uid, columns)
    _check_wholeness(uid, held, meta, sizes)
    _SOUND.add(identity)


def _counted(table: str, table_rules: list[Rule]) -> str:
    """Count the rows of a table, and those that break one of its rules or more."""
    return f"SELECT '{table}', count(*), count(*) FILTER (NOT ({sound(table_rules)})) FROM {source(table)}"


def _name_fault(con: duckdb.DuckDBPyConnection, uid: str, table: str, table_rules: list[Rule]) -> NoReturn:
    """Raise DamagedTrace for the first rule that rows of the table break."""
    counts = ", ".join(f"count(*) FILTER (NOT ({rule.holds}))" for rule in table_rules)
    results = con.execute(f"SELECT {counts} FROM {source(table)}").fetchall()[0]
    rule, rows = next((rule, rows) for rule, rows in zip(table_rules, results, strict=True) if rows)
    raise DamagedTrace(uid, table, rule.column, rule.fault, rows)


def _check_keys(con: duckdb.DuckDBPyConnection, uid: str, held: dict[str, int], sizes: Sizes) -> None:
    """No key of a table has two rows."""
    distinct = " UNION ALL ".join(
        f"SELECT '{table}', count(DISTINCT {packed(key, sizes)}) FROM {source(table)}"
        for table, key in KEYS.items()
        if held[table] > 1
    )
    for table, keys in con.execute(distinct).fetchall() if distinct else ():
        if keys != held[table]:
            raise DamagedTrace(uid, table, ", ".join(KEYS[table]), "duplicate", held[table] - keys)


def _check_spans(con: duckdb.DuckDBPyConnection, uid: str, columns: dict[str, dict[str, Column]]) -> None:
    """Look for ids of no span where the ids of spans have gaps."""
    for table, columns_of_table in columns.items():
        column = columns_of_table.get("span")
        if table == "span" or column is None:
            continue
        ids = "unnest(span)" if column.kind.endswith("[]") else "span"
        unknown = con.execute(
            f"SELECT count(*) FROM (SELECT DISTINCT {ids} AS id FROM {source(table)}) "
            "WHERE id >= 0 AND id NOT IN (SELECT span FROM run.main.span)"
        ).fetchall()[0][0]
        if unknown:
            raise DamagedTrace(uid, table, "span", "unknown_span", unknown)


def _check_wholeness(uid: str, held: dict[str, int], meta: RunMeta, sizes: Sizes) -> None:
    """Every step, layer and head has its row, but in tables that were not recorded or stayed behind."""
    for table, rows in sizes.whole().items():
        per_head = table in ("head_step", "kv_step") and meta.trace_level != "summary" and table not in meta.left_out
        required = table == "token" or per_head
        if held[table] != rows and (held[table] or required):
            raise DamagedTrace(uid, table, "", "incomplete", abs(rows - held[table]))
