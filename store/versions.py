"""Files of earlier schemas. What a file's schema did not have was not recorded: columns are NULL there, tables empty.

Reading: the tables that grew or came after schema 1 are read through a relation of the same name in the reader's private database,
a view of the file's own table where there is one. Recovering: an unfinished file is brought to this schema before it is finished.

Schema 2 added the KV metrics below and the tables journal and kv_span.
"""

from __future__ import annotations

from kvlens.store.schema import JOURNAL, KV_SPAN, SCHEMA_VERSION, kv_type, layer_type, moments

_METRICS = ("blocking_bytes", "ideal_bytes", "recalled_tokens", "reused_tokens", "similarity")
#: Columns that schema 1 lacks, with their types.
_COLUMNS: dict[str, dict[str, str]] = {
    "kv_step": {name: kv_type(name) for name in _METRICS},
    "kv_run": moments(_METRICS),
    "layer_step": {name: layer_type(name) for name in _METRICS},
}
#: Tables that schema 1 lacks, and how an empty one is made.
_TABLES = {"journal": JOURNAL, "kv_span": KV_SPAN}

#: Read from the private database; all other tables are read from the file.
GROWN = (*_COLUMNS, *_TABLES)


def source(table: str) -> str:
    """Full name under which the reader's statements find a table."""
    return f"memory.main.{table}" if table in GROWN else f"run.main.{table}"


def tables_of(version: int | None, tables: tuple[str, ...]) -> set[str]:
    """Those of `tables` that a file of that schema must hold; a file that does not say its schema is taken for one of this."""
    return set(tables) - (set(_TABLES) if _first(version) else set())


def relations(version: int | None) -> list[str]:
    """Statements that make the relations of `source` in a private database to which the file is attached as `run`."""
    made = []
    for table in GROWN:
        if not _first(version):
            made.append(f"CREATE VIEW {table} AS SELECT * FROM run.main.{table}")
        elif table in _COLUMNS:
            absent = ", ".join(f"NULL::{kind} AS {name}" for name, kind in _COLUMNS[table].items())
            made.append(f"CREATE VIEW {table} AS SELECT *, {absent} FROM run.main.{table}")
        else:
            made.append(_TABLES[table])
    return made


def upgrades(version: int | None) -> list[str]:
    """Statements that bring an open, unfinished file of that schema to this one."""
    if not _first(version):
        return []
    added = [f"ALTER TABLE {table} ADD COLUMN {name} {kind}" for table, columns in _COLUMNS.items() for name, kind in columns.items()]
    return [*added, *_TABLES.values(), f"UPDATE meta SET value = '{SCHEMA_VERSION}' WHERE key = 'schema_version'"]


def _first(version: int | None) -> bool:
    return version is not None and version < 2
