"""Segments: named parts of a prompt, such as system, instruction, documents, question, turns and thinking.

Every token of a prompt is in one segment at most. Three sources name them, the later ones first: the chat form (system,
turns, thinking, template), markers in the text or character ranges that a person gives, and the prompt's question. The
rest of a person's text is the segment `text`. No torch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

TEXT, TEMPLATE, SYSTEM, QUESTION, THINKING = "text", "template", "system", "question", "thinking"
_HAND = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")
_THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_NAME = re.compile(r"[^\s=,:][^=,:]{0,39}")
MOST = 64
"""segments that a person may name"""


class BadSegment(ValueError):
    """A segment that a prompt does not have, in one sentence, with its code and typed values."""

    def __init__(self, code: str, sentence: str, **values: str | int) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code, self.values = code, values


@dataclass(frozen=True)
class Segment:
    """A named range: [start, end) of characters or tokens."""

    name: str
    start: int
    end: int


def pairs_of(items: Iterable[str]) -> list[tuple[str, str | tuple[int, int]]]:
    """Return (name, marker) of NAME=MARKER, without the spaces around a marker that has no line break, and (name,
    (start, end)) of NAME=START:END. Raises BadSegment, `bad_segment`."""
    pairs: list[tuple[str, str]] = []
    for item in items:
        name, sign, place = item.partition("=")
        place = place if "\n" in place else place.strip()
        if not sign or not place:
            raise BadSegment("bad_segment", f"--segment takes NAME=MARKER or NAME=START:END, not '{item}'.", given=item)
        pairs.append((name.strip(), place))
    return [(name, _hand_range(place)) for name, place in pairs]


def _hand_range(place: str) -> str | tuple[int, int]:
    """Return (start, end) of START:END, and a marker as it is."""
    hand = _HAND.fullmatch(place)
    return place if hand is None else (int(hand[1]), int(hand[2]))


def find_segments(pairs: Sequence[tuple[str, str | tuple[int, int]]], text: str) -> tuple[Segment, ...]:
    """Return the character ranges of (name, marker) or (name, (start, end)): a marked segment begins with its marker
    and ends where the next one begins, or with the text.

    Raises BadSegment with the code bad_segment (no place, a name given twice, too many), segment_not_found (the marker
    is not in the text) or segment_outside (the range is not in the text)."""
    if len(pairs) > MOST:
        raise BadSegment(
            "bad_segment", f"{len(pairs)} segments are named, at most {MOST} are accepted.", given=len(pairs)
        )
    starts: dict[str, int] = {}
    ranges: list[Segment] = []
    for name, place in pairs:
        if name in starts or name in {part.name for part in ranges}:
            raise BadSegment(
                "bad_segment", f"segment '{name}' is named twice: give each segment a name of its own.", given=name
            )
        if not _NAME.fullmatch(name):
            raise BadSegment(
                "bad_segment",
                f"'{name}' is no name for a segment: give 1 to 40 characters, without '=', ',' and ':'.",
                given=name,
            )
        if not place:
            raise BadSegment("bad_segment", f"segment '{name}' has no place: give its marker or its range.", given=name)
        if isinstance(place, str):
            begin = text.find(place)
            if begin < 0:
                raise BadSegment(
                    "segment_not_found",
                    f"the marker '{place[:60]}' of segment '{name}' is not in the prompt: give it as it is there.",
                    name=name,
                    marker=place,
                )
            starts[name] = begin
            continue
        start, end = _range(name, place)
        if not 0 <= start < end <= len(text):
            raise BadSegment(
                "segment_outside",
                f"segment '{name}' from {start} to {end} is empty or not in the prompt of {len(text):,} characters.",
                name=name,
                start=start,
                end=end,
            )
        ranges.append(Segment(name, start, end))
    edges = sorted({*starts.values(), len(text)})
    marked = [Segment(name, begin, min(edge for edge in edges if edge > begin)) for name, begin in starts.items()]
    return tuple(sorted((*marked, *ranges), key=lambda part: (part.start, -part.end)))


def _range(name: str, place: object) -> tuple[int, int]:
    """Return (start, end) of a place. Raises BadSegment, `bad_segment`, unless they are two whole numbers."""
    try:
        start, end = map(operator.index, place)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise BadSegment(
            "bad_segment", f"segment '{name}' takes a marker or [start, end] in whole numbers.", given=name
        ) from None
    return start, end


def token_segments(
    ranges: Sequence[tuple[int, int]],
    opening: str,
    text: tuple[int, int],
    named: Sequence[Segment],
    question: int | None,
    system: str | None,
    turns: Sequence[tuple[str, str]],
    chat: bool,
) -> tuple[Segment, ...]:
    """Return the segments of a prompt's tokens, in order; () where there is nothing to tell apart.

    ranges: characters [start, end) of each token; opening: what the chat form puts before the person's text; text,
    named, question: of the person's text; all in characters of what is fed. system, turns: of the chat form, as
    `opening` has them; chat: the prompt is in the chat form."""
    parts = [Segment(TEXT, *text)]
    searched = 0
    for name, words in [(SYSTEM, system or "")] + [
        (f"turn {n + 1} {role}", message) for n, (role, message) in enumerate(turns)
    ]:
        start = opening.find(words.strip(), searched) if words.strip() else -1
        if start < 0:
            continue
        searched = start + len(words.strip())
        parts.append(Segment(name, start, searched))
        parts += [Segment(THINKING, start + m.start(), start + m.end()) for m in _THINKING.finditer(words.strip())]
    parts += named
    if question is not None:
        parts.append(Segment(QUESTION, question, text[1]))
    if len(parts) == 1 and not chat:
        return ()
    names: list[str | None] = []
    for start, end in ranges:
        middle = (start + end) / 2
        owner = next((part.name for part in reversed(parts) if end > start and part.start <= middle < part.end), None)
        names.append(owner or (TEMPLATE if chat else None))
    segments, place = [], 0
    for owned, run in groupby(names):
        count = len(list(run))
        if owned is not None:
            segments.append(Segment(owned, place, place + count))
        place += count
    return tuple(segments)


def refuse_empty(named: Iterable[Segment], segments: Iterable[Segment]) -> None:
    """Raise BadSegment, `bad_segment`, for a named segment that no token of `segments` belongs to."""
    names = {part.name for part in segments}
    for part in named:
        if part.name not in names:
            raise BadSegment(
                "bad_segment",
                f"no token belongs to segment '{part.name}': the question or other segments take all of its text.",
                given=part.name,
            )


def refuse_covered(named: Sequence[Segment], length: int, question: int | None) -> None:
    """Raise BadSegment, `bad_segment`, for a named segment all of whose characters belong to another segment or to the
    question: no token can belong to it. length: characters of the text; question: the first one of its question."""
    edges = {0, length, *(edge for part in named for edge in (part.start, part.end))}
    if question is not None:
        edges.add(question)
    pieces = list(pairwise(sorted(edges)))
    refuse_empty(named, token_segments(pieces, "", (0, length), named, question, None, (), False))


def joined(segments: Iterable[Segment]) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Return the ranges of each name, in the order in which names first occur."""
    ranges: dict[str, tuple[tuple[int, int], ...]] = {}
    for part in segments:
        ranges[part.name] = (*ranges.get(part.name, ()), (part.start, part.end))
    return ranges
