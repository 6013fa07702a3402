"""A prompt of a wanted length: sentences of a real text in their order, facts at their places, a question behind
them."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvlens.refusal import Refusal
from kvlens.tasks.base import Encode

HEAD = "Read this text, then answer the question about it.\n\n"
NEAR = 0.01
"""share of the length within which no closer fit is looked for"""
DROPPED, TRIED = 4, 8
"""at the end of the haystack: sentences given up for one that fits better, and how many of about that length, on either
side, are counted"""
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Content:
    """What a task hides: the asked sentences with the share of the haystack before each (None: anywhere, drawn), other
    facts anywhere, what stands before the haystack and what after it."""

    asked: Sequence[str]
    shares: Sequence[float | None]
    others: Sequence[str] = ()
    head: str = HEAD
    tail: str = ""
    """the question"""
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

    def gap(self, hay: Sequence[str], length: int) -> int:
        """Tokens that the whole prompt is short of its length; negative: above it."""
        return length - self._special - len(self._encode(self.render(hay)[0]))

    def render(self, hay: Sequence[str]) -> tuple[str, Ranges]:
        """The whole text and where the asked sentences stand. Drawn places are the same for every haystack tried."""
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
        started_job = 0
        for slot, index in slots:
            pieces += [(piece, None) for piece in hay[started_job:slot]]
            pieces.append((content.asked[index] if index >= 0 else content.others[-1 - index], index))
            started_job = slot
        pieces += [(piece, None) for piece in hay[started_job:]]
        ranges: dict[int, tuple[int, int]] = {}
        start = len(content.head)
        for piece, place in pieces:
            if place is not None and place >= 0:
                ranges[place] = (start, start + len(piece))
            start += len(piece) + 1
        return content.head + " ".join(piece for piece, _ in pieces) + content.tail, tuple(
            ranges[place] for place in sorted(ranges)
        )


def compose(
    name: str, content: Content, length: int, rng: random.Random, encode: Encode, special: int, hay: Sequence[str]
) -> tuple[str, Ranges]:
    """(text, character ranges of the asked sentences in their order). The haystack is whole sentences of `hay`, in
    their order from a drawn place, from the beginning again when they end; its last one is chosen so that the prompt
    has `length` tokens with the special ones, or as few less as can be found: with a text of many sentences, less than
    2 % of a prompt above 256 tokens.

    Raises ValueError with one sentence when the length does not hold the facts.
    """
    layout = Layout(content, encode, special, rng.randrange(2**32))
    room = layout.gap([], length)
    if room < 0:
        raise Refusal(
            f"a {name} prompt needs at least {length - room} tokens with this tokenizer, not {length}",
            code="too_short",
            needed=length - room,
            tokens=length,
        )
    start = rng.randrange(len(hay))
    texts: list[str] = []
    while (size := layout.size(piece := hay[(start + len(texts)) % len(hay)])) <= room:
        texts.append(piece)
        room -= size
    while layout.gap(texts, length) < 0:
        texts.pop()
    while layout.gap(longer := [*texts, hay[(start + len(texts)) % len(hay)]], length) >= 0:
        texts = longer
    return layout.render(_closed(layout, texts, length, hay))


def _closed(layout: Layout, texts: list[str], length: int, hay: Sequence[str]) -> list[str]:
    """The haystack with a last sentence that comes nearer to the length, its own last ones given up for it."""
    best, gap = texts, layout.gap(texts, length)
    spare = sorted(set(hay).difference(texts) or set(hay), key=lambda piece: (len(piece), piece))
    letters = [len(piece) for piece in spare]
    per_token = sum(map(len, texts)) / sum(map(layout.size, texts)) if texts else 1.0
    room = gap
    for dropped in range(min(DROPPED, len(texts)) + 1):
        if gap <= NEAR * length:
            break
        kept_tokens = texts[: len(texts) - dropped]
        if dropped:
            room += layout.size(texts[-dropped])
        place = bisect_right(letters, room * per_token)
        near = [piece for piece in spare[max(0, place - TRIED) : place + TRIED] if layout.size(piece) <= room]
        for piece in sorted(near, key=layout.size, reverse=True)[:2]:
            remaining = layout.gap([*kept_tokens, piece], length)
            if 0 <= remaining < gap:
                best, gap = [*kept_tokens, piece], remaining
    return best


def _nearest(ends: Sequence[int], goal: float) -> int:
    return min(range(len(ends)), key=lambda place: abs(ends[place] - goal))
