"""Ranges of token positions: joined, cut, and what remains of holds and drops where others name the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from kvlens.memory.holds import Drop, Hold

_Kind = TypeVar("_Kind", Hold, Drop)
Range = tuple[int, int]
"""positions [start, end)"""


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in order, those that touch as one."""
    pairs: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if pairs and start <= pairs[-1][1]:
            pairs[-1] = pairs[-1][0], max(end, pairs[-1][1])
        else:
            pairs.append((start, end))
    return tuple(pairs)


def without(whole: Range, taken_ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the parts of a range that no taken range covers."""
    free_ranges: list[Range] = []
    start, end = whole
    for first_token, last in joined(taken_ranges):
        if start < min(first_token, end):
            free_ranges.append((start, min(first_token, end)))
        start = max(start, last)
    return (*free_ranges, (start, end)) if start < end else tuple(free_ranges)


def less(ranges: Iterable[_Kind], named_holds: Iterable[Hold] | Iterable[Drop]) -> tuple[_Kind, ...]:
    """Return of holds or drops what `named_holds` lacks for the same KV head, whatever step it begins at."""
    named = tuple(named_holds)
    remaining: list[_Kind] = []
    for hold in ranges:
        groups: dict[tuple[Range, ...], list[tuple[int, int]]] = {}
        whole = hold.tok_start, hold.tok_end
        for head in hold.heads:
            taken_ranges = (
                (named_hold.tok_start, named_hold.tok_end) for named_hold in named if head in named_hold.heads
            )
            groups.setdefault(without(whole, taken_ranges), []).append(head)
        for heads_by_range, heads in groups.items():
            for start, end in heads_by_range:
                rest = hold.whole and (start, end) == whole
                remaining.append(replace(hold, tok_start=start, tok_end=end, heads=tuple(heads), whole=rest))
    return tuple(remaining)
