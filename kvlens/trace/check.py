"""The check of a trace of the open format: every rule of every column, then what the tables promise each other.

A trace that passes can be stored; `records.py` trusts what is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvlens.trace.cells import Values, column_faults, no_values, numbers
from kvlens.trace.faults import BadTrace, Fault
from kvlens.trace.head import Head
from kvlens.trace.promises import first_rows, promise_faults
from kvlens.trace.source import Loaded, Source
from kvlens.trace.tables import TABLES

MOST_FAULTS = 50
"""faults that are reported of one trace"""
_RANGES = {"span": ("tok_start", "tok_end"), "token": ("char_start", "char_end"), "transfer": ("start_us", "end_us")}


@dataclass(frozen=True)
class Checked:
    """A trace without faults: its head and its tables, each with the columns that it has, of the format's types."""

    head: Head
    tables: dict[str, pa.Table]
    prompt: int
    """tokens of the prompt"""


def check(folder: Path) -> Checked:
    """Read and check a trace. Raises BadTrace with its faults, MOST_FAULTS at most."""
    source = Source(folder)
    faults: list[Fault] = []
    unknown = [name for name in source.tables if name not in TABLES and not name.startswith("x_")]
    faults += [Fault("unknown_table", name, rule=", ".join(TABLES)) for name in unknown]
    faults += [Fault("missing_table", name) for name in TABLES if TABLES[name].required and name not in source.tables]
    if faults:
        raise BadTrace(faults)
    loaded = {name: source.read(name) for name in TABLES if name in source.tables}
    sizes = _sizes(source.head, loaded)
    tables: dict[str, pa.Table] = {}
    for name, held in loaded.items():
        table_faults, table = _check_table(name, held, sizes)
        faults += table_faults
        tables[name] = table
    if not faults:  # the tables' columns can be trusted now
        for name, table in tables.items():
            most = {"span": tables["span"].num_rows, "lost_pos": sizes["pos"], "reference_lost_pos": sizes["pos"]}
            row_faults = [*_long_lists(name, table, most), *_between_rows(name, table, source.head, sizes)]
            row_faults += _unknown_spans(name, table, tables["span"])
            faults += [_placed(fault, loaded[name]) for fault in row_faults]
    if faults:
        raise BadTrace(faults[:MOST_FAULTS])
    return Checked(source.head, tables, sizes["prompt"])


def _sizes(head: Head, loaded: dict[str, Loaded]) -> dict[str, int]:
    """Name of an id -> how many there are; `positions` and `prompt` count tokens."""
    positions = loaded["token"].table.num_rows
    return {
        "step": head.steps,
        "layer": head.layers,
        "q_head": head.q_heads,
        "kv_head": head.kv_heads,
        "pos": positions,
        "lost_pos": positions,
        "reference_lost_pos": positions,
        "span": 1 << 16,
        "prompt": positions - head.steps,
    }


def _check_table(name: str, held: Loaded, sizes: dict[str, int]) -> tuple[list[Fault], pa.Table]:
    """The faults of a table's columns, and the table in the format's types."""
    about = TABLES[name]
    faults = [Fault("unknown_column", name, column, rule=", ".join(about.columns)) for column in held.unknown]
    arrays: dict[str, pa.Array] = {}
    for column, rule in about.columns.items():
        if column not in held.table.column_names or pa.types.is_null(held.table.schema.field(column).type):
            if rule.required and (held.table.num_rows or column not in held.table.column_names):
                faults.append(Fault("missing_column", name, column))
            elif rule.required:  # a writer of no rows does not know the type
                arrays[column] = no_values(rule)
            continue
        values = Values.from_array(held.table[column].combine_chunks(), rule)
        if values is None:
            kind = str(held.table.schema.field(column).type)
            faults.append(Fault("wrong_type", name, column, rule=rule.kind, value=kind))
            continue
        faults += [_placed(f, held) for f in column_faults(name, column, rule, values, sizes, about.between)]
        arrays[column] = values.array
    return faults, pa.table(arrays)


def _placed(fault: Fault, held: Loaded) -> Fault:
    """The fault with its row's file."""
    if fault.row is None or not held.files:
        return fault
    file, row = held.place(fault.row)
    return Fault(fault.code, fault.table, fault.column, file, row, fault.rule, fault.value, fault.rows)


def _between_rows(name: str, table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    """Rules of several columns or rows of a table."""
    about = TABLES[name]
    if about.key:
        packed = _packed(table, about.key, sizes)
        _, firsts, counts = np.unique(packed, return_index=True, return_counts=True)
        again = np.ones(len(packed), bool)
        again[firsts] = False
        yield from first_rows(name, "duplicate", ", ".join(about.key), again, "one row of each key")
        if counts.size and counts.max() > 1:
            return
    if name in _RANGES and set(_RANGES[name]) <= set(table.column_names):
        start, end = (numbers(table[column]) for column in _RANGES[name])
        yield from first_rows(name, "reversed", _RANGES[name][1], end < start, f"{_RANGES[name][0]} or more", end)
    for group in about.equal_lists:
        lists = [column for column in group if column in table.column_names]
        for column in lists[1:]:
            lengths = [numbers(pc.list_value_length(table[each])) for each in (lists[0], column)]
            differ = (lengths[0] != lengths[1]) & ~np.isnan(lengths[1])
            yield from first_rows(name, "unequal_lists", column, differ, f"as many as {lists[0]}", lengths[1])
    yield from promise_faults(name, table, head, sizes)


def _unknown_spans(name: str, table: pa.Table, spans: pa.Table) -> Iterator[Fault]:
    """Ids of spans that the table of spans lacks."""
    for column in ("span", "refused_span", "missed_span"):
        if name == "span" or column not in table.column_names or not table.num_rows:
            continue
        values = table[column].combine_chunks()
        rows = np.arange(table.num_rows)
        if pa.types.is_large_list(values.type):
            rows = np.repeat(rows, pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False))
            values = values.flatten()
        is_span = pc.is_in(values, spans["span"].combine_chunks())
        broken = np.zeros(table.num_rows, bool)
        broken[rows[~is_span.to_numpy(zero_copy_only=False) & values.is_valid().to_numpy(zero_copy_only=False)]] = True
        yield from first_rows(name, "unknown_span", column, broken, "a span of the table span")


def _long_lists(name: str, table: pa.Table, most: dict[str, int]) -> Iterator[Fault]:
    """Lists of ids that have more items than there are ids: all rows are stored as wide as the longest list. most: of
    each column."""
    for column, count in most.items():
        if column in table.column_names and pa.types.is_large_list(table.schema.field(column).type):
            lengths = np.nan_to_num(numbers(pc.list_value_length(table[column])))
            yield from first_rows(
                name, "duplicate", column, lengths > count, f"at most {count} items", lengths.astype(int)
            )


def _packed(table: pa.Table, key: tuple[str, ...], sizes: dict[str, int]) -> np.ndarray:
    whole = np.zeros(table.num_rows, np.int64)
    for column in key:
        whole = whole * (sizes[column] + 1) + numbers(table[column]).astype(np.int64)
    return whole
