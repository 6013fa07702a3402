"""What a call holds or drops, as the counterfactuals of kvlens.lens take it."""

from __future__ import annotations

from collections.abc import Sequence

from kvlens.api.errors import RequestError
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
    Raises RequestError where nothing, or a head alone, is named, and for a last token before the first."""
    pieces = [Piece(int(number), None, int(of_layer), int(head)) for of_layer, head, number in triples]
    if span is not None:
        pieces.append(Piece(span, None, layer, kv_head))
    if tokens is not None:
        if tokens[1] < tokens[0]:
            raise RequestError("bad_range", f"tokens= takes (first, last), and {tokens[0]} is behind {tokens[1]}.")
        pieces.append(Piece(None, (tokens[0], tokens[1] + 1), layer, kv_head))
    pieces += [Piece(None, part, layer, kv_head) for part in ranges]
    if not pieces:
        raise RequestError("nothing_named", "say what to hold or drop: pass span=, tokens=, segment= or triples=.")
    return tuple(pieces)
