"""A prompt of an exact length: filler sentences, facts at their places, and padding counted by the tokenizer at
hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvlens.tasks.base import Encode
from kvlens.tasks.words import ADJECTIVES, sentence

PADS = (
    *(f" {word}" for word in ("and", "then", "so", "on", "again", *ADJECTIVES[:12])),
    " a",
    ".",
    ",",
    "!",
    "0",
    "x",
    "~",
)
"""pieces that lengthen the head by a few tokens"""
TRIES = 400
"""re-counted texts until padding gives up; a byte-pair tokenizer needs a handful"""
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Content:
    """What a task hides: the asked sentences with the share of the haystack before each (None: anywhere, drawn), other
    facts anywhere, what stands before the haystack (padding goes where it says {pad}) and what after it."""

    asked: Sequence[str]
    shares: Sequence[float | None]
    others: Sequence[str] = ()
    head: str = "Read this text{pad}.\n"
    tail: str = ""
    opening: str = ""
    """how the answer begins in the chat form"""


class Layout:
    """One prompt on its way to its length."""

    def __init__(self, content: Content, encode: Encode, special: int, places: int) -> None:
        self.content, self._encode, self._special, self._places = content, encode, special, places
        self._sizes: dict[str, int] = {}

    def size(self, piece: str) -> int:
        """Tokens of a sentence inside the text."""
        if piece not in self._sizes:
            self._sizes[piece] = len(self._encode(" " + piece))
        return self._sizes[piece]

    def count(self, text: str) -> int:
        """Tokens of the whole prompt."""
        return self._special + len(self._encode(text))

    def render(self, hay: Sequence[str], pad: str = "") -> tuple[str, Ranges]:
        """The whole text and where the asked sentences stand. Drawn places are the same for every padding tried."""
        content, rng = self.content, random.Random(self._places)
        ends = [0, *accumulate(map(self.size, hay))]
        anywhere = [round(rng.random() * len(hay)) for _ in range(len(content.asked) + len(content.others))]
        slots = [
            (anywhere[index] if share is None else _nearest(ends, share * ends[-1]), index)
            for index, share in enumerate(content.shares)
        ]
        slots += [(anywhere[len(content.asked) + index], -1 - index) for index in range(len(content.others))]
        # What is asked keeps the very first and the very last place against other facts of the same slot.
        slots.sort(key=lambda slot: (slot[0], (slot[1] >= 0) != (slot[0] == 0), slot[1]))
        pieces: list[tuple[str, int | None]] = []
        begun = 0
        for slot, index in slots:
            pieces += [(piece, None) for piece in hay[begun:slot]]
            pieces.append((content.asked[index] if index >= 0 else content.others[-1 - index], index))
            begun = slot
        pieces += [(piece, None) for piece in hay[begun:]]
        head = content.head.replace("{pad}", pad)
        ranges: dict[int, tuple[int, int]] = {}
        start = len(head)
        for piece, place in pieces:
            if place is not None and place >= 0:
                ranges[place] = (start, start + len(piece))
            start += len(piece) + 1
        return head + " ".join(piece for piece, _ in pieces) + content.tail, tuple(
            ranges[place] for place in sorted(ranges)
        )


def compose(
    name: str,
    content: Content,
    length: int,
    rng: random.Random,
    encode: Encode,
    special: int,
    draw: Callable[[random.Random], str] = sentence,
) -> tuple[str, Ranges]:
    """(text, character ranges of the asked sentences in their order). The text has exactly `length` tokens with the
    special ones wherever a piece of padding is one token by itself, else the nearest number below that was found.

    Raises ValueError with one sentence when the length does not hold the facts.
    """
    layout = Layout(content, encode, special, rng.randrange(2**32))
    least = layout.count(layout.render([])[0])
    if length < least:
        raise ValueError(f"a {name} prompt needs at least {least} tokens with this tokenizer, not {length}")
    hay: list[str] = []
    room = length - least
    while (size := layout.size(piece := draw(rng))) <= room:
        hay.append(piece)
        room -= size
    while True:
        made = lengthen(lambda pad: layout.render(hay, pad), length, layout.count, rng, encode)
        if made is not None:
            return made
        hay.pop()


def lengthen(
    render: Callable[[str], tuple[str, Ranges]],
    length: int,
    count: Callable[[str], int],
    rng: random.Random,
    encode: Encode,
) -> tuple[str, Ranges] | None:
    """What `render` makes with the padding that brings its text to `length` tokens, or nearest below; None when it is
    too long without."""
    sizes = {piece: max(1, len(encode(piece))) for piece in PADS}
    pads: list[str] = []
    banned: set[tuple[int, str]] = set()
    best: tuple[int, tuple[str, Ranges]] | None = None
    for _ in range(TRIES):
        made = render("".join(pads))
        gap = length - count(made[0])
        if gap >= 0 and (best is None or gap < best[0]):
            best = gap, made
        if gap == 0:
            break
        fitting = [piece for piece in PADS if sizes[piece] <= gap and (len(pads), piece) not in banned]
        if fitting:
            largest = max(sizes[piece] for piece in fitting)
            pads.append(rng.choice([piece for piece in fitting if sizes[piece] == largest]))
        elif pads:
            last = pads.pop()
            banned.add((len(pads), last))
        else:
            break
    return None if best is None else best[1]


def _nearest(ends: Sequence[int], goal: float) -> int:
    return min(range(len(ends)), key=lambda place: abs(ends[place] - goal))
