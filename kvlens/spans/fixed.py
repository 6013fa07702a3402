"""Spans of fixed size."""

from __future__ import annotations

from kvlens.spans.span import Span


def fixed_chunks(start: int, end: int, size: int, kind: str = "chunk") -> list[Span]:
    """[start, end) cut every `size` tokens; the last span keeps the rest."""
    if size < 1:
        raise ValueError(f"a {kind} needs at least one token, got {size}")
    cuts = range(start, end, size)
    return [Span(a, min(a + size, end), kind, f"Every {size} tokens from token {start}.") for a in cuts]
