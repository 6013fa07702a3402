"""The span, spans of fixed size, the statistics of a surprisal sequence, and what every segmenter promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlens.refusal import Refusal

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Span:
    """Token positions [tok_start, tok_end) that a method treats as one thing.

    kind: 'sink' and 'anchor' are runs of full-resolution tokens, 'entropy' a span cut by surprisal, 'short' a span
    too short to be worth compressing (it stays raw), 'chunk' and 'page' have a fixed size.
    """

    tok_start: int
    tok_end: int
    kind: str
    reason: str
    mean_surprisal: float | None = None
    """nats; None where no token of the span has a surprisal (token 0 is predicted by nothing)"""

    def __len__(self) -> int:
        return self.tok_end - self.tok_start


@dataclass(frozen=True)
class Surprisal:
    """Mean and standard deviation of the prompt's surprisals in nats; frozen, they also cut the decoded blocks
    (Abaskohi et al., sec. 3.1)."""

    mu: float
    sigma: float

    @classmethod
    def measure(cls, nats: Sequence[float] | FloatArray, start: int = 0) -> Surprisal:
        """Over `nats` [N] of the tokens start..start+N; token 0 has no surprisal and does not count."""
        values = finite(nats, start)[1 if start == 0 else 0 :]
        return cls(float(values.mean()), float(values.std())) if len(values) else cls(0.0, 0.0)

    def threshold(self, alpha: float) -> float:
        """A token is a boundary when its surprisal is above this (Abaskohi et al., sec. 3.1)."""
        return self.mu + alpha * self.sigma


def finite(nats: Sequence[float] | FloatArray, start: int) -> FloatArray:
    """`nats` as float64 [N]; refuses NaN and infinities, except for token 0, which has no surprisal and becomes 0."""
    values = np.array(nats, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"surprisals must be one sequence, got shape {values.shape}")
    if start == 0 and len(values):
        values[0] = 0.0
    if not np.isfinite(values).all():
        bad = start + int(np.flatnonzero(~np.isfinite(values))[0])
        raise Refusal(f"the surprisal of token {bad} is not a finite number", code="not_finite", token=bad)
    return values


def mean_nats(nats: FloatArray, start: int, a: int, b: int) -> float | None:
    """Mean surprisal of the tokens [a, b), or None where there is none to average. `nats` [N] belongs to
    start..start+N."""
    first_item = max(a, 1)
    if first_item >= b:
        return None
    mean = float(nats[first_item - start : b - start].mean())
    assert math.isfinite(mean)
    return mean


def check_partition(spans: Sequence[Span], start: int, end: int) -> None:
    """Raise unless the spans cover [start, end) in order, without gap, overlap or empty span."""
    position = start
    for span in spans:
        if span.tok_start != position or span.tok_end <= span.tok_start:
            raise ValueError(f"span [{span.tok_start}, {span.tok_end}) does not continue at token {position}")
        position = span.tok_end
    if position != end:
        raise ValueError(f"the spans end at token {position}, not at {end}")


def fixed_chunks(start: int, end: int, size: int, kind: str = "chunk") -> list[Span]:
    """[start, end) cut every `size` tokens; the last span keeps the rest."""
    if size < 1:
        raise ValueError(f"a {kind} needs at least one token, got {size}")
    cuts = range(start, end, size)
    return [Span(a, min(a + size, end), kind, f"Every {size} tokens from token {start}.") for a in cuts]
