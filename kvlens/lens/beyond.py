"""What was held, or dropped, beyond what was before; and what is left of it where the opposite is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from kvlens.lens.lines import joined
from kvlens.lens.search import Head
from kvlens.memory.holds import Drop, Hold
from kvlens.meta import Held, RunMeta
from kvlens.text.units import counted

_Kind = TypeVar("_Kind", Hold, Drop)
Range = tuple[int, int]
"""positions [start, end)"""


def beyond(holds: Iterable[Held], had: Iterable[Held]) -> tuple[Held, ...]:
    """Of `holds`, the positions that `had` does not hold for the same KV head from that step or an earlier one on,
    whichever spans either names them by."""
    there: dict[Head, list[tuple[Range, int]]] = {}
    for hold in had:
        for head in hold.heads:
            there.setdefault(head, []).append(((hold.tok_start, hold.tok_end), hold.from_step))
    left: list[Held] = []
    for hold in holds:
        groups: dict[tuple[Range, ...], list[Head]] = {}
        whole = hold.tok_start, hold.tok_end
        for head in hold.heads:
            taken = (at for at, since in there.get(head, ()) if since <= hold.from_step)
            groups.setdefault(_without(whole, taken), []).append(head)
        for ranges, heads in groups.items():
            for start, end in ranges:
                said = {"heads": tuple(heads), "tok_start": start, "tok_end": end}
                left.append(hold.model_copy(update=said | ({} if (start, end) == whole else {"whole": False})))
    return tuple(left)


def shared(ranges: Iterable[Held], had: Iterable[Held]) -> int:
    """Positions that `ranges` and `had` name for a same KV head."""
    others = tuple(had)
    both = (
        (max(one.tok_start, other.tok_start), min(one.tok_end, other.tok_end))
        for one in ranges
        for other in others
        if set(one.heads) & set(other.heads)
    )
    return sum(end - start for start, end in joined((start, end) for start, end in both if start < end))


def kept_of(holds: Iterable[Held], drops: Iterable[Held], had: RunMeta) -> str:
    """What of holds and drops the run that is repeated had too: '8 tokens held, 12 tokens dropped'; '' for nothing."""
    both = (shared(holds, had.hold), "held"), (shared(drops, had.drop), "dropped")
    return ", ".join(f"{counted(tokens, 'token')} {verb}" for tokens, verb in both if tokens)


def less(ranges: Iterable[_Kind], others: Iterable[Hold] | Iterable[Drop]) -> tuple[_Kind, ...]:
    """Of holds or drops, what `others` does not name for the same KV head, whatever the steps."""
    named = tuple(others)
    left: list[_Kind] = []
    for one in ranges:
        groups: dict[tuple[Range, ...], list[Head]] = {}
        whole = one.tok_start, one.tok_end
        for head in one.heads:
            taken = ((other.tok_start, other.tok_end) for other in named if head in other.heads)
            groups.setdefault(_without(whole, taken), []).append(head)
        for found, heads in groups.items():
            for start, end in found:
                rest = one.whole and (start, end) == whole
                left.append(replace(one, tok_start=start, tok_end=end, heads=tuple(heads), whole=rest))
    return tuple(left)


def _without(whole: Range, taken: Iterable[Range]) -> tuple[Range, ...]:
    """What is left of a range."""
    left: list[Range] = []
    start, end = whole
    for first, last in joined(taken):
        if start < min(first, end):
            left.append((start, min(first, end)))
        start = max(start, last)
    return (*left, (start, end)) if start < end else tuple(left)
