"""What a counterfactual holds or drops, piece by piece, as commands and links write it: a span or a range of tokens,
for all KV heads, for those of a layer, or for one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvlens.lens.lines import ranges_in_words
from kvlens.lens.search import Head
from kvlens.metaparts import Held

_WRITTEN = re.compile(r"(?:(\d{1,9})|t(\d{1,9})(?:-(\d{1,9}))?)(?:\.L(\d{1,4})(?:\.KV(\d{1,4}))?)?", re.ASCII)
FORM = "SPAN or tFIRST-LAST (positions), each with .L2 or .L2.KV1 behind it for the KV heads of a layer, or one of them"


@dataclass(frozen=True)
class Piece:
    """One of span and tokens is there."""

    span: int | None = None
    tokens: tuple[int, int] | None = None
    """positions [start, end)"""
    layer: int | None = None
    """None: all"""
    kv_head: int | None = None
    """None: all of the layer's"""

    @classmethod
    def parse(cls, text: str, option: str = "--hold") -> Piece:
        """'40', 't396-401', '40.L2', '40.L2.KV1'. Raises ValueError with one sentence."""
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{option} {text[:40]}: give {FORM}.")
        span, first_token, last, layer, head = (None if part is None else int(part) for part in match.groups())
        if first_token is None:
            return cls(span, None, layer, head)
        if last is not None and last < first_token:
            raise ValueError(f"{option} {text[:40]}: a range goes from the lower position to the higher.")
        return cls(None, (first_token, (first_token if last is None else last) + 1), layer, head)

    def __str__(self) -> str:
        place = str(self.span)
        if self.tokens is not None:
            first_token, last = self.tokens[0], self.tokens[1] - 1
            place = f"t{first_token}" if first_token == last else f"t{first_token}-{last}"
        layer = "" if self.layer is None else f".L{self.layer}"
        return place + layer + ("" if self.kv_head is None else f".KV{self.kv_head}")

    def describe_tokens(self) -> str:
        """'span 40', 'tokens 396-401'."""
        return f"span {self.span}" if self.tokens is None else ranges_in_words((self.tokens,))

    def describe_heads(self) -> str:
        """'all KV heads', 'KV heads of L2', 'L2 KV1'."""
        if self.layer is None:
            return "all KV heads"
        return f"KV heads of L{self.layer}" if self.kv_head is None else f"L{self.layer} KV{self.kv_head}"

    def heads(self, layers: int, kv_heads: int) -> tuple[Head, ...]:
        """The (layer, KV head) of a model that it is held or dropped for. Raises ValueError, one sentence, where the
        model has no such layer or head."""
        for noun, number, count in (("layer", self.layer, layers), ("KV head", self.kv_head, kv_heads)):
            if number is not None and number >= count:
                raise ValueError(f"{self}: the model has {count} {noun}s, counted from 0.")
        return tuple(
            (layer, head)
            for layer in (range(layers) if self.layer is None else (self.layer,))
            for head in (range(kv_heads) if self.kv_head is None else (self.kv_head,))
        )


def pieces_of(holds: Iterable[Held], layers: int, kv_heads: int) -> tuple[Piece, ...]:
    """What was held, or dropped, in a run of a model with so many layers and KV heads, as few pieces as say it."""
    pieces: dict[Piece, None] = {}
    for hold in holds:
        span, tokens = (hold.span, None) if hold.whole else (None, (hold.tok_start, hold.tok_end))
        for layer, head in _wheres(sorted(set(hold.heads)), layers, kv_heads):
            pieces[Piece(span, tokens, layer, head)] = None
    return tuple(pieces)


def _wheres(heads: Sequence[Head], layers: int, kv_heads: int) -> list[tuple[int | None, int | None]]:
    """(layer, KV head), None for all."""
    if len(heads) == layers * kv_heads:
        return [(None, None)]
    places: list[tuple[int | None, int | None]] = []
    for layer, group in groupby(heads, key=lambda head: head[0]):
        layer_heads = [head for _, head in group]
        places += [(layer, None)] if len(layer_heads) == kv_heads > 1 else [(layer, head) for head in layer_heads]
    return places
