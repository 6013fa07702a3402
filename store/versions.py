"""Files of earlier schemas. What a file's schema did not have was not recorded: columns are NULL there, tables empty.

Reading: the tables that grew or came after schema 1 are read through a relation of the same name in the reader's
private database, a view of the file's own table where there is one. Recovering: an unfinished file is brought to this
schema before it is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.store.schema import (
    CUT,
    DECISION,
    EFFECT,
    JOURNAL,
    KV_SPAN,
    LOSS,
    ORACLE,
    ORACLE_LOST,
    ORACLE_REFERENCE,
    PHASE,
    SCHEMA_VERSION,
    SPAN_KEY,
    head_type,
    kv_type,
    layer_type,
    moments,
)


@dataclass(frozen=True)
class Addition:
    """What one schema added to the one before it."""

    columns: dict[str, dict[str, str]]
    """table -> column -> type"""
    tables: dict[str, str]
    """table -> how an empty one is made"""


_V2 = ("blocking_bytes", "ideal_bytes", "recalled_tokens", "reused_tokens", "similarity")
_V3 = ("regret",)
_V4 = ("read_bytes",)
_V5 = ("mass_mean", "mass_quantised")
_V6 = ("unread",)
_V7 = ("selection_recall",)
_V10 = ("reference_regret", "reference_unread")
_V11 = ("zoom_asked", "zoom_refused")
_V13 = ("mass_rewritten",)
ADDED = {
    2: Addition(
        {
            "kv_step": {name: kv_type(name) for name in _V2},
            "kv_run": moments(_V2),
            "layer_step": {name: layer_type(name) for name in _V2},
        },
        {"journal": JOURNAL, "kv_span": KV_SPAN},
    ),
    3: Addition(
        {
            "head_step": {name: head_type(name) for name in _V3},
            "head_run": moments(_V3),
            "layer_step": dict.fromkeys(_V3, "FLOAT"),
        },
        {"loss": LOSS, "oracle": ORACLE, "span_key": SPAN_KEY},
    ),
    4: Addition(
        {
            "kv_step": {name: kv_type(name) for name in _V4},
            "kv_run": moments(_V4),
            "layer_step": {name: layer_type(name) for name in _V4},
        },
        {"cut": CUT},
    ),
    5: Addition(
        {
            "head_step": {name: head_type(name) for name in _V5},
            "head_run": moments(_V5),
            "layer_step": dict.fromkeys(_V5, "FLOAT"),
        },
        {},
    ),
    6: Addition(
        {
            "head_step": {name: head_type(name) for name in _V6},
            "head_run": moments(_V6),
            "layer_step": dict.fromkeys(_V6, "FLOAT"),
            "oracle": ORACLE_LOST,
            "event": {"after_attention": "BOOLEAN"},
        },
        {},
    ),
    7: Addition(
        {
            "head_step": {name: head_type(name) for name in _V7},
            "head_run": moments(_V7),
            "layer_step": dict.fromkeys(_V7, "FLOAT"),
        },
        {},
    ),
    8: Addition({}, {}),  # events of kind drop, and of the meta what they are for
    9: Addition({}, {"effect": EFFECT}),
    10: Addition(
        {
            "head_step": {name: head_type(name) for name in _V10},
            "head_run": moments(_V10),
            "layer_step": dict.fromkeys(_V10, "FLOAT"),
            "oracle": ORACLE_REFERENCE,
        },
        {},
    ),
    11: Addition(
        {
            "head_step": {name: head_type(name) for name in _V11},
            "head_run": moments(_V11),
            "layer_step": dict.fromkeys(_V11, "FLOAT"),
        },
        {"decision": DECISION, "phase": PHASE},
    ),
    12: Addition({}, {}),  # of the table step, what an imported trace may lack is NULL
    13: Addition(
        {
            "head_step": {name: head_type(name) for name in _V13},
            "head_run": moments(_V13),
            "layer_step": dict.fromkeys(_V13, "FLOAT"),
        },
        {},
    ),
}

#: Read from the private database; all other tables are read from the file.
GROWN = tuple(dict.fromkeys(table for added in ADDED.values() for table in (*added.columns, *added.tables)))
#: Tables whose rows are told in the order in which they were written: their relations have it as `place`.
_ORDERED = ("event",)


def source(table: str) -> str:
    """Full name under which the reader's statements find a table."""
    return f"memory.main.{table}" if table in GROWN else f"run.main.{table}"


def _later(version: int | None) -> list[Addition]:
    """What schemas after a file's added; a file that does not say its schema is taken for one of this."""
    return [] if version is None else [added for number, added in ADDED.items() if number > version]


def tables_of(version: int | None, tables: tuple[str, ...]) -> set[str]:
    """Those of `tables` that a file of that schema must hold."""
    return set(tables).difference(*(added.tables for added in _later(version)))


def relations(version: int | None) -> list[str]:
    """Statements that make the relations of `source` in a private database to which the file is attached as `run`."""
    texts, later = [], _later(version)
    for table in GROWN:
        absent = {name: kind for added in later for name, kind in added.columns.get(table, {}).items()}
        empty = next((added.tables[table] for added in later if table in added.tables), None)
        columns = "".join(f", NULL::{kind} AS {name}" for name, kind in absent.items())
        columns += ", rowid AS place" if table in _ORDERED else ""
        texts.append(empty or f"CREATE VIEW {table} AS SELECT *{columns} FROM run.main.{table}")
    return texts


def upgrades(version: int | None) -> list[str]:
    """Statements that bring an open, unfinished file of that schema to this one. A table that it lacks is made as it is
    now, whatever was added to it later."""
    texts: list[str] = []
    whole: set[str] = set()
    for added in _later(version):
        texts += [
            f"ALTER TABLE {table} ADD COLUMN {name} {kind}"
            for table, new in added.columns.items()
            for name, kind in new.items()
            if table not in whole
        ]
        texts += added.tables.values()
        whole |= added.tables.keys()
    later = f"UPDATE meta SET value = '{SCHEMA_VERSION}' WHERE key = 'schema_version'"
    return [*texts, later] if _later(version) else []


def meta_now(mapping: dict[str, Any]) -> dict[str, Any]:
    """The meta table of a file of any schema as this schema says it. Keys that came later are absent: not recorded.

    Schemas 1 to 3 let a made-up run give its budget as a number and its machine as a text.
    """
    meta = dict(mapping)
    if isinstance(budget := meta.get("budget"), int | float) and not isinstance(budget, bool):
        meta["budget"] = str(budget)
    if isinstance(machine := meta.get("machine"), str):
        meta["machine"] = {"processor": machine}
    return meta
