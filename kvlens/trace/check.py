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

from kvlens.rows import MASS_COLUMNS
from kvlens.trace.cells import Values, column_faults, numbers
from kvlens.trace.faults import BadTrace, Fault
from kvlens.trace.head import Head
from kvlens.trace.source import Loaded, Source
from kvlens.trace.tables import TABLES

MASS_TOLERANCE = 2e-3
"""masses are sums of float32 numbers, stored to 1e-4"""
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
            continue
        values = Values.of(held.table[column].combine_chunks(), rule)
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


def _first(name: str, code: str, column: str, broken: np.ndarray, rule: str, value: object = None) -> Iterator[Fault]:
    rows = np.flatnonzero(broken)
    if rows.size:
        shown = value[rows[0]] if isinstance(value, np.ndarray) else value
        yield Fault(code, name, column, None, int(rows[0]), rule, None if shown is None else str(shown), int(rows.size))


def _between_rows(name: str, table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    """Rules of several columns or rows of a table."""
    about = TABLES[name]
    if about.key:
        packed = _packed(table, about.key, sizes)
        _, first_rows, counts = np.unique(packed, return_index=True, return_counts=True)
        again = np.ones(len(packed), bool)
        again[first_rows] = False
        yield from _first(name, "duplicate", ", ".join(about.key), again, "one row of each key")
        if counts.size and counts.max() > 1:
            return
    if name in _RANGES and set(_RANGES[name]) <= set(table.column_names):
        start, end = (numbers(table[column]) for column in _RANGES[name])
        yield from _first(name, "reversed", _RANGES[name][1], end < start, f"{_RANGES[name][0]} or more", end)
    for group in about.equal_lists:
        lists = [column for column in group if column in table.column_names]
        for column in lists[1:]:
            lengths = [numbers(pc.list_value_length(table[each])) for each in (lists[0], column)]
            differ = (lengths[0] != lengths[1]) & ~np.isnan(lengths[1])
            yield from _first(name, "unequal_lists", column, differ, f"as many as {lists[0]}", lengths[1])
    yield from _PROMISES.get(name, _none)(table, head, sizes)


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
        yield from _first(name, "unknown_span", column, broken, "a span of the table span")


def _long_lists(name: str, table: pa.Table, most: dict[str, int]) -> Iterator[Fault]:
    """Lists of ids that have more items than there are ids: all rows are stored as wide as the longest list. most: of
    each column."""
    for column, count in most.items():
        if column in table.column_names and pa.types.is_large_list(table.schema.field(column).type):
            lengths = np.nan_to_num(numbers(pc.list_value_length(table[column])))
            yield from _first(name, "duplicate", column, lengths > count, f"at most {count} items", lengths.astype(int))


def _packed(table: pa.Table, key: tuple[str, ...], sizes: dict[str, int]) -> np.ndarray:
    whole = np.zeros(table.num_rows, np.int64)
    for column in key:
        whole = whole * (sizes[column] + 1) + numbers(table[column]).astype(np.int64)
    return whole


def _none(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    yield from ()


def _tokens(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    """The prompt's positions first, then one per step."""
    if sizes["prompt"] < 1:
        rule = "a token of the prompt, and one per step"
        yield Fault("incomplete", "token", "pos", rule=rule, value=f"{table.num_rows} tokens, {head.steps} steps")
        return
    pos = numbers(table["pos"])
    step = numbers(table["step"]) if "step" in table.column_names else np.full(len(pos), np.nan)
    want = np.where(pos < sizes["prompt"], np.nan, pos - sizes["prompt"])
    wrong = (step != want) & ~(np.isnan(step) & np.isnan(want))
    yield from _first("token", "misplaced", "step", wrong, f"pos - {sizes['prompt']}, NULL in the prompt", step)


def _steps(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    if table.num_rows != head.steps:
        yield Fault("incomplete", "step", "step", rule=f"{head.steps} rows", value=f"{table.num_rows} rows")


def _spans(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    end = numbers(table["tok_end"])
    most = sizes["pos"]
    yield from _first("span", "out_of_range", "tok_end", end > most, f"at most {most}, the tokens of the run", end)


def _heads(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    want = head.steps * head.layers * head.q_heads
    if table.num_rows != want:
        rule = f"{want} rows: every step, layer and query head"
        yield Fault("incomplete", "head_step", "q_head", rule=rule, value=f"{table.num_rows} rows")
    logged = [column for column in MASS_COLUMNS if column in table.column_names and table[column].null_count < want]
    if logged and table.num_rows:
        total = sum(numbers(table[column]) for column in logged)
        wrong = ~(np.abs(total - 1) <= MASS_TOLERANCE)  # NULL is NaN: a role is recorded in all rows or in none
        rule = f"{' + '.join(logged)} = 1"
        yield from _first("head_step", "mass_sum", logged[0], wrong, rule, np.round(total, 4))


def _decisions(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    total, granted, refused, missed = (numbers(table[name]) for name in ("asked", "granted", "refused", "missed"))
    broken = total != granted + refused + missed
    yield from _first("decision", "wrong_sum", "asked", broken, "granted + refused + missed", total)
    for name, counts in (("refused_span", refused), ("missed_span", missed)):
        lengths = numbers(pc.list_value_length(table[name]))
        rule = f"as many as {name.removesuffix('_span')}"
        yield from _first("decision", "unequal_lists", name, lengths != counts, rule, lengths)


def _effects(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    """Effects are positive, and all are of one choice."""
    effect = numbers(table["effect"])
    yield from _first("effect", "out_of_range", "effect", effect <= 0, "more than 0", effect)
    for name in ("step", "lead"):
        values = numbers(table[name])
        yield from _first("effect", "several_values", name, values != values[:1], "one value in all rows", values)


_PROMISES = {
    "token": _tokens,
    "step": _steps,
    "span": _spans,
    "head_step": _heads,
    "decision": _decisions,
    "effect": _effects,
}
