"""What was held, or dropped, beyond what was before; and what is left of it where the opposite is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from kvlens.lens.lines import joined, ranges_in_words
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
            groups.setdefault(without(whole, taken), []).append(head)
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
    """Of holds or drops, what `others` does not name for the same KV head; `in_time` sees that none begins later."""
    named = tuple(others)
    left: list[_Kind] = []
    for one in ranges:
        groups: dict[tuple[Range, ...], list[Head]] = {}
        whole = one.tok_start, one.tok_end
        for head in one.heads:
            taken = ((other.tok_start, other.tok_end) for other in named if head in other.heads)
            groups.setdefault(without(whole, taken), []).append(head)
        for found, heads in groups.items():
            for start, end in found:
                rest = one.whole and (start, end) == whole
                left.append(replace(one, tok_start=start, tok_end=end, heads=tuple(heads), whole=rest))
    return tuple(left)


def untouched(holds: Iterable[Hold], drops: Iterable[Drop]) -> tuple[Hold, ...]:
    """Of holds, those of which `drops` name no token, head by head."""
    named = tuple(drops)
    left: list[Hold] = []
    for hold in holds:
        over = [drop for drop in named if drop.tok_start < hold.tok_end and drop.tok_end > hold.tok_start]
        heads = tuple(head for head in hold.heads if not any(head in drop.heads for drop in over))
        if heads:
            left.append(replace(hold, heads=heads))
    return tuple(left)


def in_time(asked: Iterable[Hold] | Iterable[Drop], had: Iterable[Hold] | Iterable[Drop]) -> None:
    """Raises ValueError, one sentence, where something asked begins at a later step than the opposite that the run
    has of the same tokens and KV head: `less` takes that away from its first step on, so the steps between would be
    otherwise too."""
    there = tuple(had)
    for one in asked:
        for other in there:
            start, end = max(one.tok_start, other.tok_start), min(one.tok_end, other.tok_end)
            both = set(one.heads) & set(other.heads)
            if start < end and both and other.from_step < one.from_step:
                layer, kv_head = min(both)
                raise ValueError(
                    f"the run {other.verb}s {ranges_in_words(((start, end),))} for layer {layer}, KV head {kv_head} "
                    f"from step {other.from_step} on: {one.verb} from that step on or an earlier one, not from step "
                    f"{one.from_step}."
                )


def without(whole: Range, taken: Iterable[Range]) -> tuple[Range, ...]:
    """What is left of a range."""
    left: list[Range] = []
    start, end = whole
    for first, last in joined(taken):
        if start < min(first, end):
            left.append((start, min(first, end)))
        start = max(start, last)
    return (*left, (start, end)) if start < end else tuple(left)
