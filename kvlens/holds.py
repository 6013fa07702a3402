"""Holds and drops, what a counterfactual does with token ranges for chosen (layer, KV head), whatever the method does
with them: a hold keeps them exactly on the device, a drop keeps them out of the attention. And ranges of positions:
joined, cut, and what remains of holds and drops where others name the same tokens. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from kvlens.refusal import Refusal
from kvlens.rows import SpanRow
from kvlens.shape import KVShape

Triple = tuple[int, int, int]
"""(layer, KV head, span)"""
Range = tuple[int, int]
"""positions [start, end)"""


@dataclass(frozen=True)
class _Ranged:
    """Positions [tok_start, tok_end) of a span, for some heads from a step on."""

    verb: ClassVar[str]
    """what is done with them, as an error says it"""
    span: int
    """id of the span whose range this is, as the run that it is for numbers it"""
    tok_start: int
    tok_end: int
    heads: tuple[tuple[int, int], ...]
    """(layer, KV head), each once"""
    from_step: int = 0
    whole: bool = True
    """False: these are some of the span's tokens"""

    def __post_init__(self) -> None:
        if not 0 <= self.tok_start < self.tok_end:
            raise Refusal(
                f"span {self.span} has no tokens to {self.verb} ({self.tok_start} to {self.tok_end}).",
                code="empty_range",
                span=self.span,
            )
        if self.from_step < 0:
            raise Refusal(
                f"--from-step {self.from_step}: the first step is 0.", code="step_below_zero", step=self.from_step
            )


@dataclass(frozen=True)
class Hold(_Ranged):
    """Kept exactly on the device and attended."""

    verb = "hold"


@dataclass(frozen=True)
class Drop(_Ranged):
    """Attended by none of the heads' query heads. Bytes stay where they are: nothing is freed, and the method decides
    as if nothing had been dropped, but for what it learns from attention weights."""

    verb = "drop"


def check(holds: Sequence[Hold], drops: Sequence[Drop], shape: KVShape, positions: int) -> None:
    """Raises ValueError, one sentence, where a hold or drop names a layer, KV head or position that the run does not
    have, or for what `apart` refuses."""
    for hold in (*holds, *drops):
        if hold.tok_end > positions:
            raise ValueError(f"span {hold.span} ends at token {hold.tok_end}, the run has {positions} at most.")
        for layer, kv_head in hold.heads:
            if not (0 <= layer < shape.layers and 0 <= kv_head < shape.kv_heads):
                raise ValueError(
                    f"there is no layer {layer}, KV head {kv_head}: the model has {shape.layers} layers of "
                    f"{shape.kv_heads} KV heads."
                )

    apart(holds, drops)


def apart(holds: Sequence[Hold], drops: Sequence[Drop]) -> None:
    """Raises ValueError, one sentence, where the same tokens are held and dropped for the same KV head."""
    for hold in holds:
        for drop in drops:
            start, end = max(hold.tok_start, drop.tok_start), min(hold.tok_end, drop.tok_end)
            both = set(hold.heads) & set(drop.heads)
            if start < end and both:
                layer, kv_head = min(both)
                which = f"token {start}" if end - start == 1 else f"tokens {start} to {end - 1}"
                raise Refusal(
                    f"{which} would be both held and dropped for layer {layer}, KV head {kv_head}: leave one of "
                    "the two out.",
                    code="held_and_dropped",
                    layer=layer,
                    kv_head=kv_head,
                )


def tokens_of(ranges: Sequence[Hold] | Sequence[Drop]) -> int:
    """Different positions that are held, or dropped, for any head."""
    return len({position for tokens in ranges if tokens.heads for position in range(tokens.tok_start, tokens.tok_end)})


def held_bytes(holds: Sequence[Hold], shape: KVShape) -> int:
    """Bytes of the keys and values that are held, each (token, layer, KV head) once; without tables and unused
    slots."""
    held: dict[tuple[int, int], set[int]] = {}
    for hold in holds:
        for head in hold.heads:
            held.setdefault(head, set()).update(range(hold.tok_start, hold.tok_end))
    return sum(map(len, held.values())) * shape.head_token_bytes


def holds_of(triples: Sequence[Triple], spans: Mapping[int, SpanRow], from_step: int = 0) -> list[Hold]:
    """Return triples as holds, one per span. spans: the rows of those named, the window not among them."""
    heads: dict[int, list[tuple[int, int]]] = {}
    for layer, head, span in triples:
        heads.setdefault(span, []).append((layer, head))
    return [
        Hold(span, spans[span].tok_start, spans[span].tok_end, tuple(sorted(set(head_list))), from_step)
        for span, head_list in heads.items()
    ]


_Kind = TypeVar("_Kind", Hold, Drop)


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
