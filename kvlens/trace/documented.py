"""Columns of the open format that the stored trace has too: their types, units and meanings are those of the store."""

from __future__ import annotations

from kvlens.decisions import DECISION_KINDS, DECISION_UNITS
from kvlens.store.columnrules import SHARES
from kvlens.store.schema import UNITS, head_type, kv_type
from kvlens.tables.column import ID, SHARE
from kvlens.tables.dictionary import DECISIONS, HEAD_STEPS, KV_STEPS, STEPS
from kvlens.trace.columns import FLAG, FLOAT, FLOATS, INTEGER, INTEGERS, TEXT, Column

_COUNTS = {"USMALLINT": 2**16 - 1, "UINTEGER": 2**32 - 1}
"""SQL type of a count -> the largest"""


def id_column(meaning: str, required: bool = True) -> Column:
    """Return the column of an id."""
    return Column(INTEGER, meaning, ID, required)


def _metric(name: str, kind: str, unit: str, meaning: str) -> Column:
    if kind == "BOOLEAN":
        return Column(FLAG, meaning, unit)
    if kind != "FLOAT":
        return Column(INTEGER, meaning, unit, most=_COUNTS.get(kind))
    if name in SHARES:
        return Column(FLOAT, meaning, unit, least=0, most=1)
    if name in ("qcos", "similarity"):
        return Column(FLOAT, meaning, unit, least=-1, most=1)
    return Column(FLOAT, meaning, unit)


def head_column(name: str) -> Column:
    """Return a metric of head_step."""
    documented = HEAD_STEPS[UNITS.get(name, name)]
    return _metric(name, head_type(name), documented.unit, documented.meaning)


def kv_column(name: str) -> Column:
    """Return a metric of kv_step."""
    return _metric(name, kv_type(name), KV_STEPS[name].unit, KV_STEPS[name].meaning)


def decision_column(name: str) -> Column:
    """Return a column of decision."""
    meaning, unit = DECISIONS[name].meaning, DECISIONS[name].unit
    if name in ("score", "cut"):
        return Column(FLOAT, meaning, unit, infinite=True)
    words = {"kind": DECISION_KINDS, "unit": DECISION_UNITS}.get(name, ())
    if words:
        return Column(TEXT, meaning, required=True, words=words)
    if name.endswith("_span"):
        return Column(INTEGERS, meaning.removesuffix(", by spaces"), unit, required=True)
    return Column(INTEGER, meaning, unit, required=name in ("step", "asked", "granted", "refused", "missed"))


def mass_column(meaning: str, required: bool = False) -> Column:
    """Return a list of masses."""
    return Column(FLOATS, meaning, SHARE, required, 0, 1)


def step_column(name: str, required: bool = False) -> Column:
    """Return a figure of step."""
    return Column(INTEGER, STEPS[name].meaning, STEPS[name].unit, required)
