"""What a counterfactual is asked: spans and ranges of tokens to hold or to drop, for some heads, from a step on; and
what of the run's request to change, the budget or parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvlens.holds import Drop, Hold
from kvlens.lens.pieces import Piece
from kvlens.lens.search import Head
from kvlens.lens.span_parts import Part, parts
from kvlens.refusal import Refusal
from kvlens.rows import SpanRow

_Kind = TypeVar("_Kind", Hold, Drop)


class Named(Protocol):
    """A stored run, as far as naming its tokens and KV heads needs."""

    @property
    def uid(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def spans(self) -> tuple[SpanRow, ...]: ...
    @property
    def positions(self) -> int:
        """Tokens that went through the model."""
        ...


MOST_DIGITS = 9
"""of a number that is read at all"""


@dataclass(frozen=True)
class TrialRequest:
    """What to hold and to drop, whole spans and ranges of tokens, and what to change. layers, kv_heads: 'all' or like
    0,2-4."""

    spans: tuple[int, ...] = ()
    layers: str = "all"
    kv_heads: str = "all"
    from_step: int = 0
    search: bool = False
    """among these heads, look for the fewest that bring the answer back, and hold the spans for those"""
    tokens: tuple[tuple[int, int], ...] = ()
    """ranges of positions [start, end), of any span, the window's too"""
    pieces: tuple[Piece, ...] = ()
    """held as well, each for its own heads"""
    changed: Mapping[str, str] = field(default_factory=dict)
    """asked for otherwise than of the run: `budget`, or parameters by their names"""
    fewest: int | None = None
    """look for the fewest bytes that bring the answer back, by so many trials at most; what to hold is not said then"""
    drops: tuple[Piece, ...] = ()
    """not attended, each by its own heads"""
    bits: int | None = None
    """look for the fewest extra bits of a quantised run that bring the answer back, by so many trials at most"""

    @property
    def holds(self) -> bool:
        """It says what to hold."""
        return bool(self.spans or self.tokens or self.pieces)


def numbers(text: str, count: int, noun: str) -> tuple[int, ...]:
    """'all' or '0,2-4' -> numbers below `count`, ascending. Raises ValueError with one sentence."""
    if text.strip() == "all":
        return tuple(range(count))
    results: set[int] = set()
    for part in text.split(","):
        first_number, dash, last = part.strip().partition("-")
        if not _digits(first_number) or (dash and not _digits(last)):
            raise ValueError(f"--{noun} {text[:40]}: give all, or numbers and ranges like 0,2-4.")
        if max(len(first_number), len(last)) > MOST_DIGITS or int(last or first_number) >= count:
            raise ValueError(f"--{noun} {text[:40]}: the model has {count}, counted from 0.")
        if dash and int(last) < int(first_number):
            raise Refusal(f"--{noun} {text}: a range goes from the lower number to the higher.", code="range_reversed")
        results |= set(range(int(first_number), int(last or first_number) + 1))
    return tuple(sorted(results))


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def token_range(text: str) -> tuple[int, int]:
    """'396-401' or '396' -> [396, 402) or [396, 397). Raises ValueError with one sentence."""
    first_token, dash, last = text.strip().partition("-")
    if not _digits(first_token) or (dash and not _digits(last)):
        raise ValueError(f"--tokens {text[:40]}: give the position of a token, or a range like 396-401.")
    if dash and int(last) < int(first_token):
        raise ValueError(f"--tokens {text[:40]}: a range goes from the lower position to the higher.")
    return int(first_token), int(last or first_token) + 1


def holds_for(
    past: Named, request: TrialRequest, heads: tuple[Head, ...], only: frozenset[Head] | None = None
) -> tuple[Hold, ...]:
    """The spans and ranges of tokens in the run, held for `heads`, and the pieces, each for its own; all of them for
    those in `only` where that is given. Raises ValueError, one sentence, for what the run does not have."""
    if not request.holds:
        raise Refusal(
            "say what to hold: --span with the id of a span, --tokens with positions like 396-401 or --hold for chosen "
            "heads; what to leave out: --drop; or what to change: --budget or --set.",
            code="nothing_named",
        )
    named = [*(Piece(span) for span in request.spans), *(Piece(tokens=tokens) for tokens in request.tokens)]
    wanted_pieces = [(piece, heads) for piece in named]
    wanted_pieces += [(piece, piece.heads(past.layers, past.kv_heads)) for piece in request.pieces]
    if only is not None:
        wanted_pieces = [
            (piece, tuple(head for head in piece_heads if head in only)) for piece, piece_heads in wanted_pieces
        ]
    return _ranges(Hold, past, wanted_pieces, request.from_step)


def drops_for(past: Named, request: TrialRequest) -> tuple[Drop, ...]:
    """What is to be dropped, in the run. Raises ValueError, one sentence, for what the run does not have."""
    wanted_pieces = [(piece, piece.heads(past.layers, past.kv_heads)) for piece in request.drops]
    return _ranges(Drop, past, wanted_pieces, request.from_step)


def _ranges(
    kind: Callable[..., _Kind], past: Named, pairs: Sequence[tuple[Piece, tuple[Head, ...]]], from_step: int
) -> tuple[_Kind, ...]:
    ranges: list[_Kind] = []
    for piece, heads in pairs:
        if heads and piece.tokens is not None:
            ranges += [kind(*part, heads, from_step, whole) for *part, whole in _of_tokens(past, piece.tokens)]
        elif heads and piece.span is not None:
            ranges.append(kind(*_of_span(past, piece.span), heads, from_step))
    return tuple(ranges)


def _of_span(past: Named, span: int) -> tuple[int, int, int]:
    """A span's id and its range of tokens."""
    row = next((row for row in past.spans if row.span == span), None)
    if row is None:
        raise ValueError(
            f"run {past.uid} has no span {span}; its {len(past.spans)} spans are listed by: kvlens export "
            f"{past.uid} --what spans"
        )
    if row.kind == "window":
        raise ValueError(f"span {span} is the window, whose tokens change at every step; name one of the other spans.")
    return span, row.tok_start, row.tok_end


def _of_tokens(past: Named, pair: tuple[int, int]) -> Iterator[Part]:
    """A range of tokens by the spans that it lies in."""
    start, end = pair
    if end > past.positions:
        raise Refusal(
            f"run {past.uid} has no token {end - 1}; its positions are 0 to {past.positions - 1}.",
            code="no_such_token",
            token=end - 1,
        )
    yield from parts(past.spans, start, end)
