"""Values of one column of the open format: its type, and the rules of every value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvlens.store.columnrules import MOST_INTEGER, MOST_TEXT, SHARE_TOLERANCE
from kvlens.trace.columns import FLAG, FLAGS, FLOAT, FLOATS, IDS, INTEGER, INTEGERS, LISTS, TEXT, Column
from kvlens.trace.faults import Fault, quote

_ITEM = {INTEGER: pa.int64(), FLOAT: pa.float64(), FLAG: pa.bool_(), TEXT: pa.string()}
_OF_LIST = {INTEGERS: INTEGER, FLOATS: FLOAT, FLAGS: FLAG}
_GAPS = ("values", "score")
"""lists in which NULL is a number that was not recorded"""
_ID_OF = {"refused_span": "span", "missed_span": "span", "lost_pos": "lost_pos"}
MOST_TEXTS = 1 << 30
"""bytes of one column of texts, written out"""


@dataclass(frozen=True)
class Values:
    """A column in the format's type. Of a list column, `flat` has the items and `rows` the row of each."""

    array: pa.Array
    flat: pa.Array
    rows: np.ndarray | None
    """int64 [items]; None: one item per row"""
    too_large: np.ndarray
    """bool [items]: integers above 64 bits with a sign, which are 0 here"""

    @classmethod
    def from_array(cls, array: pa.Array, column: Column) -> Values | None:
        """Return the values of a column as it was read; None: it has another type."""
        if column.kind not in LISTS:
            cast = _cast(array, column.kind)
            return None if cast is None else cls(cast[0], cast[0], None, cast[1])
        kind = array.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return None
        lists = array.cast(pa.large_list(kind.value_type))
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        cast = _cast(lists.flatten(), _OF_LIST[column.kind])
        if cast is None:
            return None
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))
        whole = pa.LargeListArray.from_arrays(offsets, cast[0], mask=lists.is_null())
        return cls(whole, cast[0], np.repeat(np.arange(len(lists)), lengths), cast[1])


def no_values(column: Column) -> pa.Array:
    """Return a column of no rows, in the format's type."""
    item = _ITEM[_OF_LIST.get(column.kind, column.kind)]
    return pa.array([], pa.large_list(item) if column.kind in LISTS else item)


def numbers(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Return a column as float64, NULL as NaN."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False), np.float64)


def column_faults(
    table: str, name: str, column: Column, values: Values, sizes: Mapping[str, int], between: bool
) -> Iterator[Fault]:
    """The rules of a column that its values break, each with the first row. between: step -1 is allowed."""

    def fault_at(code: str, broken: np.ndarray, rule: str, shown: object = None) -> Iterator[Fault]:
        items = np.flatnonzero(broken)
        if not items.size:
            return
        rows = items if values.rows is None else values.rows[items]
        value = quote(values.flat[int(items[0])].as_py()) if shown is None else str(shown)
        yield Fault(code, table, name, None, int(rows[0]), rule, value, len(np.unique(rows)))

    if column.required:
        missing = np.flatnonzero(values.array.is_null().to_numpy(zero_copy_only=False))
        if missing.size:
            yield Fault("null", table, name, None, int(missing[0]), "a value", "NULL", int(missing.size))
    if values.rows is not None and name not in _GAPS:
        yield from fault_at("null", values.flat.is_null().to_numpy(zero_copy_only=False), "a value", "NULL")
    kind = _OF_LIST.get(column.kind, column.kind)
    if kind == TEXT:
        yield from _text_faults(column, values, fault_at)
    elif kind == INTEGER:
        least, most = _range(name, column, sizes, between)
        figures = values.flat.fill_null(int(least)).to_numpy(zero_copy_only=False)
        broken = values.too_large | (figures < least) | (figures > most)
        yield from fault_at("out_of_range", broken, f"{least:,} to {most:,}")
    elif kind == FLOAT:
        figures = numbers(values.flat)
        present = values.flat.is_valid().to_numpy(zero_copy_only=False)
        bad = np.isnan(figures) if column.infinite else ~np.isfinite(figures)
        yield from fault_at("not_finite", present & bad, "a number, or NULL")
        if column.least is not None and column.most is not None:
            low, high = column.least - SHARE_TOLERANCE, column.most + SHARE_TOLERANCE
            broken = present & np.isfinite(figures) & ((figures < low) | (figures > high))
            yield from fault_at("out_of_range", broken, column.rule)


def _text_faults(column: Column, values: Values, fault_at: Callable[..., Iterator[Fault]]) -> Iterator[Fault]:
    lengths = pc.fill_null(pc.binary_length(values.flat), 0).to_numpy(zero_copy_only=False)
    yield from fault_at("too_long", lengths > MOST_TEXT, f"at most {MOST_TEXT:,} bytes", int(lengths.max(initial=0)))
    if column.words:
        in_words = pc.fill_null(pc.is_in(values.flat, pa.array(column.words)), False)
        unknown = ~in_words.to_numpy(zero_copy_only=False) & values.flat.is_valid().to_numpy(zero_copy_only=False)
        yield from fault_at("unknown_word", unknown, column.rule)


def _range(name: str, column: Column, sizes: Mapping[str, int], between: bool) -> tuple[int, int]:
    """The least and the largest value of an integer column."""
    if name == "born_step":
        return -1, sizes["step"] - 1
    if name in IDS:
        return (-1 if between and name == "step" else 0), sizes[_ID_OF.get(name, name)] - 1
    if name in ("token_id", "ref_token", "top_token"):
        return 0, 2**31 - 1
    if name in ("tok_start", "tok_end", "char_start", "char_end"):
        return 0, 2**32 - 1
    return int(column.least or 0), MOST_INTEGER if column.most is None else int(column.most)


def _cast(array: pa.Array, kind: str) -> tuple[pa.Array, np.ndarray] | None:
    """(the array in the format's type, which integers are too large); None: another type."""
    stored_type, too_large = array.type, np.zeros(len(array), bool)
    if kind == TEXT:
        texts = stored_type.value_type if pa.types.is_dictionary(stored_type) else stored_type
        if not (pa.types.is_string(texts) or pa.types.is_large_string(texts)):
            return None
        if pa.types.is_dictionary(stored_type):
            sizes = pc.fill_null(pc.binary_length(array.dictionary), 0)
            total = pc.sum(pc.take(sizes, array.indices)).as_py() or 0
            if total > MOST_TEXTS:
                raise MemoryError(f"a column of texts has {total:,} bytes")
        return array.cast(pa.string()), too_large
    if kind == FLAG:
        return (array, too_large) if pa.types.is_boolean(stored_type) else None
    if kind == INTEGER:
        if pa.types.is_floating(stored_type):  # whole numbers, as an array with NaN has to write them
            try:
                return array.cast(pa.int64()), too_large
            except pa.ArrowInvalid:
                return None
        if not pa.types.is_integer(stored_type):
            return None
        if pa.types.is_uint64(stored_type):
            large = pc.fill_null(pc.greater(array, pa.scalar(2**63 - 1, pa.uint64())), False)
            too_large = large.to_numpy(zero_copy_only=False)
            array = pc.if_else(large, pa.scalar(0, pa.uint64()), array)
        return array.cast(pa.int64()), too_large
    if not (pa.types.is_floating(stored_type) or pa.types.is_integer(stored_type)):
        return None
    return array.cast(_ITEM[kind], safe=False), too_large
