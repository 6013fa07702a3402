"""What a call holds or drops, as the counterfactuals of kvlens.lens take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvlens.api.errors import RequestError
from kvlens.api.keywordtypes import refused_type
from kvlens.lens.pieces import Piece

Triple = tuple[int, int, int]
"""(layer, KV head, span)"""


def pieces_of(
    span: int | None,
    layer: int | None,
    kv_head: int | None,
    triples: Sequence[Triple],
    tokens: tuple[int, int] | None,
    ranges: Sequence[tuple[int, int]] = (),
) -> tuple[Piece, ...]:
    """Return what is to be held or dropped. tokens: (first, last); ranges: positions [start, end) beside the others.
    Raises RequestError where nothing, or a head alone, is named, for a last token before the first, and for triples or
    tokens that are none."""
    pieces = [Piece(number, None, of_layer, head) for of_layer, head, number in take_triples(triples)]
    if span is not None:
        pieces.append(Piece(span, None, layer, kv_head))
    if tokens is not None:
        tokens = _numbers("tokens", tokens, "(first, last) in whole numbers", 2)
        if tokens[1] < tokens[0]:
            raise RequestError("bad_range", f"tokens= takes (first, last), and {tokens[0]} is behind {tokens[1]}.")
        pieces.append(Piece(None, (tokens[0], tokens[1] + 1), layer, kv_head))
    pieces += [Piece(None, part, layer, kv_head) for part in ranges]
    if not pieces:
        raise RequestError("nothing_named", "say what to hold or drop: pass span=, tokens=, segment= or triples=.")
    return tuple(pieces)


def take_triples(triples: Iterable[Triple], name: str = "triples") -> list[Triple]:
    """Return (layer, KV head, span) triples as int. Raises RequestError `bad_value` for what is no list of triples."""
    form = "a list of (layer, KV head, span) in whole numbers"
    if not isinstance(triples, Iterable):
        raise refused_type(name, triples, form)
    return [_numbers(name, triple, form, 3) for triple in triples]


def _numbers(name: str, value: Any, form: str, count: int) -> Any:
    """Return a tuple of `count` numbers as int. Raises RequestError `bad_value` for anything else."""
    try:
        numbers = tuple(int(number) for number in value)
    except (TypeError, ValueError):
        raise refused_type(name, value, form) from None
    if len(numbers) != count or numbers != tuple(value):
        raise refused_type(name, value, form)
    return numbers
