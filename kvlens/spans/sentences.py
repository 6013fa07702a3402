"""Chunks that end at punctuation near a wanted length (sentence-level compression, sec. 4.1.1, algorithm 2), for a
prompt and token
by token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvlens.spans.marks import Mark
from kvlens.spans.span import Span

MARK_SHARE, LENGTH_SHARE = 0.7, 0.3
"""Weights of the mark and of the nearness to the ideal end in a split's score."""


@dataclass(frozen=True)
class Splitter:
    """The rule that cuts. A split is the position of the first token of the next chunk.

    length: wanted tokens of a chunk (L); deviation: how far from it a split may be (Delta); literal: the mark opens the
    next chunk, as the pseudo-code says, instead of ending this one; free: every mark splits, wherever it stands, and
    only a run of L + Delta tokens without one is cut (the paper's ablation 'without length control').
    """

    length: int
    deviation: int
    literal: bool = False
    free: bool = False

    def __post_init__(self) -> None:
        if self.length < 1 or self.deviation < 1:
            raise ValueError("the wanted chunk length and the largest deviation from it must be at least 1 token.")

    @property
    def least(self) -> int:
        """Fewest tokens of a chunk, except at the end of the text."""
        return 1 if self.free else max(1, self.length - self.deviation)

    @property
    def most(self) -> int:
        """Most tokens of a chunk."""
        return self.length + self.deviation

    def score(self, mark: Mark, away: int) -> float:
        """Of a split at `mark`, `away` tokens from the ideal end."""
        return MARK_SHARE * mark.weight + LENGTH_SHARE * (1 - away / self.deviation)

    def cut(self, marks: Sequence[Mark | None], start: int = 0) -> list[Span]:
        """Chunks of the tokens start..start+N, whose marks are `marks` [N] (None: no boundary)."""
        spans, end, positions = [], start + len(marks), start
        while positions < end:
            split, reason = (self._next_mark if self.free else self._best)(marks, start, positions, end)
            spans.append(Span(positions, split, "chunk", reason))
            positions = split
        return spans

    def close(self, tokens: int, newest: Mark | None) -> tuple[int, str] | None:
        """Whether the open chunk of `tokens` tokens ends now that a token with the mark `newest` was added: (how many
        of its tokens become a chunk, reason). What comes next is not known, so the first mark far enough counts, not
        the best one."""
        if newest is not None and self.least <= tokens - self.literal <= self.most:
            size = tokens - self.literal
            away = abs(size - self.length)
            return (
                size,
                (
                    f"{self._where(newest)} (weight {newest.weight:g}) while decoding, {_tokens(away)} from the "
                    f"ideal length."
                ),
            )
        if tokens >= self.most:
            return self.most, f"No boundary up to {_tokens(self.most)} while decoding: cut there."
        return None

    def _where(self, mark: Mark) -> str:
        shown = mark.text.replace("\n", "\\n")
        return f"Split {'before' if self.literal else 'after'} '{shown}'"

    def _best(self, marks: Sequence[Mark | None], start: int, position: int, end: int) -> tuple[int, str]:
        ideal = min(position + self.length, end)
        low, high = max(ideal - self.deviation, position + 1), min(ideal + self.deviation, end)
        best: tuple[float, int, int] | None = None
        for split in range(low, high + 1):
            mark = self._mark_at(marks, split - start)
            if mark is not None:
                away = abs(ideal - split)
                candidate = (self.score(mark, away), -away, -split)
                best = candidate if best is None else max(best, candidate)
        if best is None:
            if ideal == end:
                return end, f"The text ends here, {_tokens(end - position)} after the chunk began."
            return ideal, f"No boundary within {_tokens(self.deviation)} of the ideal end: cut at {self.length}."
        split = -best[2]
        mark = self._mark_at(marks, split - start)
        assert mark is not None
        where = "at the ideal end" if best[1] == 0 else f"{_tokens(-best[1])} from the ideal end"
        return split, f"{self._where(mark)} (weight {mark.weight:g}), {where}: score {round(best[0], 4):g}."

    def _mark_at(self, marks: Sequence[Mark | None], split: int) -> Mark | None:
        """The mark that a split before token `split` is made at."""
        position = split if self.literal else split - 1
        return marks[position] if position < len(marks) else None

    def _next_mark(self, marks: Sequence[Mark | None], start: int, position: int, end: int) -> tuple[int, str]:
        high = min(position + self.most, end)
        for split in range(position + 1, high + 1):
            mark = self._mark_at(marks, split - start)
            if mark is not None:
                return split, f"{self._where(mark)} (weight {mark.weight:g}), the next mark."
        if high == end:
            return end, f"The text ends here, {_tokens(end - position)} after the chunk began."
        return high, f"No mark in {_tokens(self.most)}: cut there."


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def cut_by(reason: str) -> str:
    """What cut a chunk, from its reason: 'at .' (the mark), 'no boundary' or 'end of text'."""
    results = re.match(r"Split (?:after|before) '(.+?)' \(weight", reason)
    if results:
        return f"at {results[1]}"
    return "end of text" if reason.startswith("The text") else "no boundary"
