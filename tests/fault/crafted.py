"""Crafted traces: one kind of damage each, done to a sound run's file.

Kinds follow from the schema: every table meets every damage that its columns allow, and every key of the meta meets
values of other kinds. SOUND names the kinds that a reader must open all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from kvlens.meta import RunMeta
from kvlens.store.columnrules import INFINITE, KEYS, MOST_META, MOST_TEXT, SHARES, Column, declared

HUGE_IDS = {"USMALLINT": 65_535, "UTINYINT": 255, "UINTEGER": 4_294_967_295, "INTEGER": 2_147_483_647}
IDS = ("step", "layer", "q_head", "kv_head", "span", "pos", "tok_end", "born_step")
ENDLESS = ("event.value", "self_check.value", "span_head.err_k", "span_head.err_v", "cut.cut")
"""columns that may hold an infinite number"""
OPTIONAL = ("self_check", "transfer", "event", "journal", "kv_span", "loss", "oracle", "span_key", "cut", "effect")
"""tables that a sound run may leave empty"""
VALUES: dict[str, str] = {
    "a text": '"x"',
    "a negative number": "-1",
    "a huge number": "1" + "0" * 400,
    "no finite number": "NaN",
    "an endless number": "1e999",
    "a list": "[[1]]",
    "an object": '{"a": {"b": [null]}}',
    "an empty text": '""',
    "deeply nested": "[" * 20_000 + "]" * 20_000,
    "no JSON": "{",
    "markup": '"<script>alert(1)</script>\\u202e\\u0000"',
}


@dataclass(frozen=True)
class Kind:
    """One kind of damage."""

    name: str
    group: str
    """damage without its place: null, duplicate, dangling id, ..."""
    sound: bool | None
    """the reader must open it; None: it may"""
    statements: tuple[str, ...]


def _column_kinds(table: str, name: str, column: Column) -> Iterator[tuple[str, str, bool | None, str]]:
    """(group, column, sound, expression of the damaged value)."""
    listed, kind = column.kind.endswith("[]"), column.kind.removesuffix("[]")
    wrap = "[{}]" if listed else "{}"
    if name in IDS and kind in HUGE_IDS:
        yield ("dangling id" if name == "span" else "out of range"), name, False, wrap.format(HUGE_IDS[kind])
    if kind in ("FLOAT", "DOUBLE"):
        open_ended = listed or f"{table}.{name}" in ENDLESS
        for word, group in (("nan", "NaN"), ("inf", "infinite")):
            sound = True if word == "inf" and (table, name) in INFINITE else None if open_ended else False
            yield group, name, sound, wrap.format(f"'{word}'::{kind}")
    if name in SHARES:
        yield "out of range", name, False, "57.2"
    if kind in ("UBIGINT", "BIGINT") and name.endswith("bytes"):
        yield "negative bytes", name, False, "18446744073709551615" if kind == "UBIGINT" else "-5"
    if kind == "VARCHAR":
        yield "huge string", name, False, f"repeat('x', {2 * (MOST_META if table == 'meta' else MOST_TEXT)})"
    if listed:
        yield "null in a list", name, None, "[NULL]"
        yield "unequal lists", name, None, f'list_concat("{name}", "{name}")'


def _put(table: str, name: str, value: str) -> str:
    return f'UPDATE {table} SET "{name}" = {value} WHERE rowid = (SELECT max(rowid) FROM {table})'


def table_kinds() -> Iterator[Kind]:
    """Damage to every table."""
    for table, columns in declared(None).items():
        first, column = next(iter(columns.items()))
        required = [name for name, each in columns.items() if each.required]
        copy = f"CREATE TABLE copied AS SELECT * FROM {table}", f"DROP TABLE {table}"
        back = "ALTER TABLE copied RENAME TO " + table
        yield Kind(f"{table}: missing table", "missing table", False, (f"DROP TABLE {table}",))
        yield Kind(f"{table}: empty", "empty table", table in OPTIONAL or None, (f"DELETE FROM {table}",))
        yield Kind(
            f"{table}: missing column", "missing column", False, (*copy, f'ALTER TABLE copied DROP "{first}"', back)
        )
        yield Kind(f"{table}: extra column", "extra column", False, (f"ALTER TABLE {table} ADD COLUMN place VARCHAR",))
        other = "VARCHAR" if column.kind != "VARCHAR" else "BLOB"
        retyped = f'SELECT * REPLACE ("{first}"::{other} AS "{first}") FROM {table}'
        yield Kind(f"{table}: wrong type", "wrong type", False, (f"CREATE TABLE copied AS {retyped}", copy[1], back))
        null = _put("copied", required[-1], "NULL")
        yield Kind(f"{table}.{required[-1]}: null", "null", False, (*copy, null, back))
        shuffled = f"CREATE TABLE copied AS SELECT * FROM {table} ORDER BY hash(rowid)"
        yield Kind(f"{table}: unordered", "unordered", True, (shuffled, copy[1], back))
        if table in KEYS:
            twice = f"INSERT INTO {table} SELECT * FROM {table} LIMIT 1"
            yield Kind(f"{table}: duplicate key", "duplicate key", False, (twice,))
        for name, each in columns.items():
            if table in ("head_run", "kv_run", "layer_step") and "_" in name and not name.endswith("_sum"):
                continue  # rollups have four columns per metric: one of them stands for all
            for group, of, sound, value in _column_kinds(table, name, each):
                yield Kind(f"{table}.{of}: {group} ({value[:12]})", group, sound, (_put(table, of, value),))


def meta_kinds() -> Iterator[Kind]:
    """Every key of the meta with values of other kinds."""
    for name in RunMeta.model_fields:
        for words, value in VALUES.items():
            put = f"DELETE FROM meta WHERE key = '{name}'", f"INSERT INTO meta VALUES ('{name}', $${value}$$)"
            yield Kind(f"meta {name}: {words}", f"meta: {words}", None, put)


def state_kinds() -> Iterator[Kind]:
    """What a run says of its end."""
    for words, change in {
        "no row": "DELETE FROM run_state",
        "two rows": "INSERT INTO run_state SELECT * FROM run_state",
        "more steps than rows": "UPDATE run_state SET last_step = last_step + 1",
        "fewer steps than rows": "UPDATE run_state SET last_step = 0",
        "negative steps": "UPDATE run_state SET last_step = -7",
        "a gap in the steps": "UPDATE step SET step = step + 1 WHERE step > 1",
        "a gap in the tokens": "UPDATE token SET pos = pos + 1 WHERE step > 1",
        "a step without its heads": "DELETE FROM head_step WHERE step = 1",
        "a head without its steps": "DELETE FROM kv_step WHERE kv_head = 0 AND layer = 0",
        "a head of another group": "UPDATE head_step SET kv_head = 0",
        "a span that ends before it begins": "UPDATE span SET tok_start = tok_end + 1 WHERE span = 2",
        "a copy that ends before it begins": "UPDATE transfer SET end_us = start_us - 1",
        "a state that there is not": "UPDATE span SET state = 'gone' WHERE span = 2",
        "a direction that there is not": "UPDATE transfer SET direction = 'up'",
        "a span taken out": "DELETE FROM span WHERE span = 3",
        "one KL that is NULL": "UPDATE loss SET kl = NULL",
        "a status that there is not": "UPDATE run_state SET status = 'odd'",
    }.items():
        sound = True if "NULL" in words else None if "status" in words or "negative" in words else False
        yield Kind(f"run: {words}", "run", sound, (change,))


def kinds() -> list[Kind]:
    """Every kind of damage."""
    return [*table_kinds(), *state_kinds(), *meta_kinds()]


def damage(trace: Path, kind: Kind) -> bool:
    """Do the damage to a run's file. Returns False where the file does not take it (a type or a constraint)."""
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        for statement in kind.statements:
            try:
                con.execute(statement)
            except (duckdb.ConversionException, duckdb.ConstraintException, duckdb.DependencyException):
                return False
    return True


def describe(folder: Path, **changes: Any) -> None:
    """Write other values into a run's run.json."""
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


Damage = Callable[[Path, Kind], bool]
