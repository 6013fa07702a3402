"""What a counterfactual is asked to hold: spans and ranges of tokens, for some heads, from a step on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlens.lens.search import Head
from kvlens.memory.holds import Hold
from kvlens.runs.repeat import Past


@dataclass(frozen=True)
class Asked:
    """What to hold, whole spans and ranges of tokens. layers, kv_heads: 'all' or like 0,2-4."""

    spans: tuple[int, ...] = ()
    layers: str = "all"
    kv_heads: str = "all"
    from_step: int = 0
    search: bool = False
    """among these heads, look for the fewest that bring the answer back, and hold the spans for those"""
    tokens: tuple[tuple[int, int], ...] = ()
    """ranges of positions [start, end), of any span, the window's too"""


def numbers(text: str, count: int, what: str) -> tuple[int, ...]:
    """'all' or '0,2-4' -> numbers below `count`, ascending. Raises ValueError with one sentence."""
    if text.strip() == "all":
        return tuple(range(count))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--{what} {text}: give all, or numbers and ranges like 0,2-4.")
        if dash and int(last) < int(first):
            raise ValueError(f"--{what} {text}: a range goes from the lower number to the higher.")
        found |= set(range(int(first), int(last or first) + 1))
    if max(found) >= count:
        raise ValueError(f"--{what} {text}: the model has {count}, counted from 0.")
    return tuple(sorted(found))


def token_range(text: str) -> tuple[int, int]:
    """'396-401' or '396' -> [396, 402) or [396, 397). Raises ValueError with one sentence."""
    first, dash, last = text.strip().partition("-")
    if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
        raise ValueError(f"--tokens {text[:40]}: give the position of a token, or a range like 396-401.")
    if dash and int(last) < int(first):
        raise ValueError(f"--tokens {text[:40]}: a range goes from the lower position to the higher.")
    return int(first), int(last or first) + 1


def holds_for(past: Past, asked: Asked, heads: tuple[Head, ...]) -> tuple[Hold, ...]:
    """The ranges of spans in the run and those of tokens, held for `heads`. Raises ValueError, one sentence, for what
    the run does not have."""
    if not asked.spans and not asked.tokens:
        raise ValueError("say what to hold: --span with the id of a span, or --tokens with positions like 396-401.")
    rows = {row.span: row for row in past.spans}
    holds = []
    for span in asked.spans:
        if span not in rows:
            raise ValueError(
                f"run {past.uid} has no span {span}; its {len(rows)} spans are listed by: kvlens export "
                f"{past.uid} --what spans"
            )
        row = rows[span]
        if row.kind == "window":
            raise ValueError(
                f"span {span} is the window, whose tokens change at every step; hold one of the other spans."
            )
        holds.append(Hold(span, row.tok_start, row.tok_end, heads, asked.from_step))
    return (*holds, *(hold for given in asked.tokens for hold in _of_tokens(past, given, heads, asked.from_step)))


def _of_tokens(past: Past, given: tuple[int, int], heads: tuple[Head, ...], from_step: int) -> Iterator[Hold]:
    """A range of tokens as holds of the spans that it lies in, the last that the run made of them; the window has what
    no other span has."""
    start, end = given
    if end > past.positions:
        raise ValueError(f"run {past.uid} has no token {end - 1}; its positions are 0 to {past.positions - 1}.")
    window = next((row.span for row in past.spans if row.kind == "window"), 0)
    rows = sorted((row for row in past.spans if row.kind != "window"), key=lambda row: row.tok_start)
    for row in rows:
        first, last = max(start, row.tok_start), min(end, row.tok_end)
        if first < last:
            if start < first:
                yield Hold(window, start, first, heads, from_step, whole=False)
            yield Hold(row.span, first, last, heads, from_step, (first, last) == (row.tok_start, row.tok_end))
            start = last
    if start < end:
        yield Hold(window, start, end, heads, from_step, whole=False)
