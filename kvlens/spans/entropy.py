"""Entropy-guided segmentation (Abaskohi et al., sec. 3.1): the rule as printed, and one that keeps to a memory budget.

As printed, every token whose surprisal exceeds mu + alpha * sigma is an anchor and what lies between anchors is a
span; spans below l_min stay raw. On heavy-tailed surprisals this keeps most of the cache at full resolution
(docs/evidence), so a budget of 10 % cannot hold. `entropy_feasible` is our reading: same signal, same threshold,
but a floor and a ceiling on the span length and a cap on the anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvlens.spans.span import FloatArray, Span, Surprisal, finite, mean_nats

SINKS = 4


class _Cutter:
    """Writes down spans of the tokens start..start+N with the numbers that made them."""

    def __init__(self, nats: FloatArray, start: int, stats: Surprisal, alpha: float) -> None:
        self.nats, self.start, self.stats, self.alpha = nats, start, stats, alpha
        self.threshold = stats.threshold(alpha)

    def h(self, token: int) -> float:
        return float(self.nats[token - self.start])

    def span(self, a: int, b: int, kind: str, reason: str) -> Span:
        return Span(a, b, kind, reason, mean_nats(self.nats, self.start, a, b))

    def sinks(self, b: int) -> list[Span]:
        if b <= self.start:
            return []
        return [
            self.span(
                self.start, b, "sink", f"The first {b - self.start} tokens are always kept: attention pools on them."
            )
        ]

    def anchors(self, a: int, b: int) -> Span:
        peak = max(self.h(t) for t in range(a, b))
        item = f"Surprisal {peak:.2f} nats"
        label = item if b - a == 1 else f"{b - a} tokens in a row, surprisal up to {peak:.2f} nats,"
        rule = f"{self.threshold:.2f} = {self.stats.mu:.2f} + {self.alpha:g} x {self.stats.sigma:.2f}"
        return self.span(a, b, "anchor", f"{label} above the threshold {rule}.")

    def between(self, a: int, b: int, end: int) -> str:
        remaining = "the start" if a == self.start else f"token {a - 1} ({self.h(a - 1):.2f} nats)"
        right = "the end" if b == end else f"token {b} ({self.h(b):.2f} nats)"
        return f"{b - a} tokens between {remaining} and {right}"


def entropy_paper(
    nats: Sequence[float] | FloatArray,
    alpha: float = 1.0,
    l_min: int = 16,
    *,
    start: int = 0,
    stats: Surprisal | None = None,
    sinks: int = SINKS,
) -> list[Span]:
    """The literal rule. nats [N]: surprisal of the tokens start..start+N (token 0 has none).

    Anchors are all tokens with H > mu + alpha * sigma (runs of them become one span of kind 'anchor'); the runs
    between them are spans of kind 'entropy', or 'short' when they have fewer than l_min tokens and stay raw (sec.
    3.2). stats: mu and sigma to use, those of `nats` by default; pass the prompt's for decoded blocks. sinks: tokens
    0..sinks-1 are always kept (our decision).
    """
    values = finite(nats, start)
    end = start + len(values)
    cut = _Cutter(values, start, stats or Surprisal.measure(values, start), alpha)
    first_item = min(max(start, sinks), end)
    spans = cut.sinks(first_item)
    high = values > cut.threshold
    if start == 0 and len(values):
        high[0] = False
    flips = [t for t in range(first_item + 1, end) if high[t - start] != high[t - 1 - start]]
    edges = [first_item, *flips, end] if first_item < end else []
    for a, b in pairwise(edges):
        if high[a - start]:
            spans.append(cut.anchors(a, b))
        elif b - a < l_min:
            spans.append(cut.span(a, b, "short", f"{cut.between(a, b, end)}, fewer than {l_min}: kept raw."))
        else:
            spans.append(cut.span(a, b, "entropy", f"{cut.between(a, b, end)}."))
    return spans


def entropy_feasible(
    nats: Sequence[float] | FloatArray,
    alpha: float = 1.0,
    l_min: int = 16,
    l_max: int = 128,
    anchor_cap: int | None = None,
    *,
    start: int = 0,
    stats: Surprisal | None = None,
    sinks: int = SINKS,
) -> list[Span]:
    """Our rule. Arguments as in `entropy_paper`; l_max >= 2 * l_min bounds the spans, anchor_cap the number of anchors.

    (a) tokens with H > mu + alpha * sigma become anchors in decreasing H (ties: the earlier token) unless fewer than
    l_min tokens would lie between two of them, until anchor_cap is reached; (b) a run at an edge with fewer than
    l_min tokens merges with its neighbour, whose anchor is demoted; (c) runs longer than l_max are split where H is
    highest in their middle third, at least l_min from both ends. Hence every span has l_min..l_max tokens; only a range
    that is shorter than l_min as a whole stays raw, as one 'short' span.
    """
    if l_min < 1 or l_max < 2 * l_min:
        raise ValueError(f"need 1 <= l_min and l_max >= 2 * l_min, got l_min {l_min}, l_max {l_max}")
    values = finite(nats, start)
    end = start + len(values)
    cut = _Cutter(values, start, stats or Surprisal.measure(values, start), alpha)
    first_item = min(max(start, sinks), end)
    spans = cut.sinks(first_item)
    if first_item == end:
        return spans
    if end - first_item < l_min:
        return [
            *spans,
            cut.span(first_item, end, "short", f"{end - first_item} tokens in all, fewer than {l_min}: kept raw."),
        ]
    anchors = _accept(cut, first_item, end, l_min, len(values) if anchor_cap is None else anchor_cap)
    edges = [first_item - 1, *anchors, end]
    for remaining, right in pairwise(edges):
        spans.extend(_split(cut, remaining + 1, right, end, l_min, l_max))
        if right < end:
            spans.append(cut.anchors(right, right + 1))
    return spans


def _accept(cut: _Cutter, start: int, end: int, l_min: int, cap: int) -> list[int]:
    """Anchors by non-maximum suppression, in token order: at least l_min tokens (at the edges: or none) beside each."""
    high = [t for t in range(max(start, 1), end) if cut.h(t) > cut.threshold]
    order = sorted(high, key=lambda t: (-cut.h(t), t))
    blocked = np.zeros(end - start, dtype=bool)
    accepted: list[int] = []
    for token in order:
        if len(accepted) == cap:
            break
        position = token - start
        if not blocked[position]:
            accepted.append(token)
            blocked[max(position - l_min, 0) : position + l_min + 1] = True
    # (b): suppression already keeps the inner runs long enough, only the two edges can be short.
    accepted.sort()
    if accepted and 0 < accepted[0] - start < l_min:
        accepted.pop(0)
    if accepted and 0 < end - 1 - accepted[-1] < l_min:
        accepted.pop()
    return accepted


def _split(cut: _Cutter, a: int, b: int, end: int, l_min: int, l_max: int) -> list[Span]:
    """Spans of the run [a, b), each with at most l_max tokens; the token of highest surprisal opens the right part."""
    pending = [(a, b, f"{cut.between(a, b, end)}.")] if a < b else []
    spans = []
    while pending:
        lo, hi, reason = pending.pop()
        if hi - lo <= l_max:
            spans.append(cut.span(lo, hi, "entropy", reason))
            continue
        margin = max(l_min, (hi - lo) // 3)
        position = lo + margin + int(cut.nats[lo + margin - cut.start : hi - margin + 1 - cut.start].argmax())
        why = f"a run of {hi - lo} tokens, longer than {l_max}, split at token {position} ({cut.h(position):.2f} nats)."
        pending += [(position, hi, f"Right part of {why}"), (lo, position, f"Left part of {why}")]
    return spans
