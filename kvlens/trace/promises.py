"""What the tables of a trace promise beyond the rules of each column: all rows there, sums that add up, one value."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvlens.instruments import MOST_KEY_BYTES, span_key_bytes
from kvlens.rows import MASS_COLUMNS
from kvlens.trace.cells import numbers
from kvlens.trace.faults import Fault
from kvlens.trace.head import Head

MASS_TOLERANCE = 2e-3
"""masses are sums of float32 numbers, stored to 1e-4"""


def promise_faults(name: str, table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    """Yield the faults of a table whose columns passed their own rules. sizes: name of an id -> how many there are."""
    if name in _PROMISES:
        yield from _PROMISES[name](table, head, sizes)


def first_rows(
    name: str, code: str, column: str, broken: np.ndarray, rule: str, value: object = None
) -> Iterator[Fault]:
    """Yield one fault with the first row that breaks a rule; none where no row does. broken: bool [rows]. value: of all
    rows, or one."""
    rows = np.flatnonzero(broken)
    if rows.size:
        shown = value[rows[0]] if isinstance(value, np.ndarray) else value
        yield Fault(code, name, column, None, int(rows[0]), rule, None if shown is None else str(shown), int(rows.size))


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
    yield from first_rows("token", "misplaced", "step", wrong, f"pos - {sizes['prompt']}, NULL in the prompt", step)


def _steps(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    if table.num_rows != head.steps:
        yield Fault("incomplete", "step", "step", rule=f"{head.steps} rows", value=f"{table.num_rows} rows")


def _spans(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    end = numbers(table["tok_end"])
    most = sizes["pos"]
    yield from first_rows("span", "out_of_range", "tok_end", end > most, f"at most {most}, the tokens of the run", end)


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
        yield from first_rows("head_step", "mass_sum", logged[0], wrong, rule, np.round(total, 4))


def _decisions(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    total, granted, refused, missed = (numbers(table[name]) for name in ("asked", "granted", "refused", "missed"))
    broken = total != granted + refused + missed
    yield from first_rows("decision", "wrong_sum", "asked", broken, "granted + refused + missed", total)
    for name, counts in (("refused_span", refused), ("missed_span", missed)):
        lengths = numbers(pc.list_value_length(table[name]))
        rule = f"as many as {name.removesuffix('_span')}"
        yield from first_rows("decision", "unequal_lists", name, lengths != counts, rule, lengths)


def _effects(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    """Effects are positive, and all are of one choice."""
    effect = numbers(table["effect"])
    yield from first_rows("effect", "out_of_range", "effect", effect <= 0, "more than 0", effect)
    for name in ("step", "lead"):
        values = numbers(table[name])
        yield from first_rows("effect", "several_values", name, values != values[:1], "one value in all rows", values)


def _span_keys(table: pa.Table, head: Head, sizes: dict[str, int]) -> Iterator[Fault]:
    """Every layer and KV head has the keys of the same spans, of one length and one form."""
    span, length = numbers(table["span"]), numbers(pc.list_value_length(table["key"]))
    form = table["form"].combine_chunks()
    different = ~pc.equal(form, form[0]).to_numpy(zero_copy_only=False) if len(form) else np.zeros(0, bool)
    yield from first_rows("span_key", "several_values", "form", different, "one value in all rows")
    size = length[:1] if head.head_dim is None else np.array([head.head_dim])
    rule = f"{int(size[0]) if size.size else 0} numbers in all rows"
    yield from first_rows("span_key", "unequal_lists", "key", (length != size) | (length < 1), rule, length.astype(int))
    count = len(np.unique(span))
    want = head.layers * head.kv_heads * count
    if table.num_rows != want:
        rule = f"{want} rows: every layer, KV head and span"
        yield Fault("incomplete", "span_key", "span", rule=rule, value=f"{table.num_rows} rows")
    needed = span_key_bytes(head.layers, head.kv_heads, count, int(length.max(initial=0)))
    if needed > MOST_KEY_BYTES:
        yield Fault("trace_too_large", "span_key", rule=f"at most {MOST_KEY_BYTES:,} bytes", value=f"{needed:,} bytes")


_PROMISES = {
    "token": _tokens,
    "step": _steps,
    "span": _spans,
    "head_step": _heads,
    "decision": _decisions,
    "effect": _effects,
    "span_key": _span_keys,
}
