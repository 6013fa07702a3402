"""Holds and drops named by the spans of the run that has them, which may cut its tokens otherwise than the run of
which they were asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from kvlens.holds import Drop, Hold, joined
from kvlens.lens.search import Head
from kvlens.rows import SpanRow

_Kind = TypeVar("_Kind", Hold, Drop)
Part = tuple[int, int, int, bool]
"""span, positions [first, last) of it, whether these are all of its tokens"""


def parts(rows: Iterable[SpanRow], start: int, end: int) -> Iterator[Part]:
    """Positions [start, end) by the spans that they lie in; the window has what no other span has."""
    rows_list = list(rows)
    window = next((row.span for row in rows_list if row.kind == "window"), 0)
    for row in sorted((row for row in rows_list if row.kind != "window"), key=lambda row: row.tok_start):
        first_token, last = max(start, row.tok_start), min(end, row.tok_end)
        if first_token < last:
            if start < first_token:
                yield window, start, first_token, False
            yield row.span, first_token, last, (first_token, last) == (row.tok_start, row.tok_end)
            start = last
    if start < end:
        yield window, start, end, False


def recut(kind: type[_Kind], holds: Sequence[_Kind], rows: Sequence[SpanRow]) -> tuple[_Kind, ...]:
    """The same positions, KV heads and steps of holds or drops, by the spans `rows`. What is a span there too stays in
    one piece; of the rest, what touches goes together, so that a span made of several that were held is held whole."""
    span_by_range = {(row.tok_start, row.tok_end): row.span for row in rows if row.kind != "window"}
    heads_by_part: dict[tuple[Part, int], list[Head]] = {}
    loose: dict[tuple[Head, int], list[tuple[int, int]]] = {}
    for hold in holds:
        token_range: tuple[int, int] = hold.tok_start, hold.tok_end
        for head in hold.heads:
            if token_range in span_by_range:
                heads_by_part.setdefault(((span_by_range[token_range], *token_range, True), hold.from_step), []).append(
                    head
                )
            else:
                loose.setdefault((head, hold.from_step), []).append(token_range)
    for (head, from_step), ranges in loose.items():
        for start, end in joined(ranges):
            for part in parts(rows, start, end):
                heads_by_part.setdefault((part, from_step), []).append(head)
    return tuple(
        kind(span, first_token, last, tuple(sorted(set(heads))), from_step, whole)
        for ((span, first_token, last, whole), from_step), heads in heads_by_part.items()
    )
