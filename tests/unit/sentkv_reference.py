"""SentKVCompress written from the paper and sentkv.md in float64 NumPy, slowly, token by token; imports nothing
of kvlens.

One layer. K, V: lists of positions, each [H_kv, D]. Chunks are (first, end) ranges of positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
STRONG = {".": 1.0, "?": 1.0, "!": 1.0, "\n": 0.9}
WEAK = {";": 0.7, ":": 0.7, ",": 0.4}


@dataclass
class Settings:
    length: int
    deviation: int
    sinks: int
    marks: str
    literal: bool
    group: str
    scaled: bool
    usage: float
    of: str
    quota: int
    """tokens per reader when usage is 0"""


def weight(piece: str, marks: str) -> float | None:
    """S(b) of a token, None where it is no boundary; single-character marks only."""
    table = {"none": {}, "one": {".": 1.0}, "mid": STRONG, "full": {**STRONG, **WEAK}}[marks]
    text = piece.rstrip(" ")
    return table.get(text[-1]) if text else None


def split(pieces: list[str], start: int, s: Settings) -> list[tuple[int, int]]:
    """Algorithm 2 over the tokens from `start` on: at every turn all splits of the window are scored."""
    n, at, out = len(pieces), start, []
    while at < n:
        ideal = min(at + s.length, n)
        best, score = ideal, -math.inf
        for b in sorted(
            range(max(ideal - s.deviation, at + 1), min(ideal + s.deviation, n) + 1), key=lambda b: (abs(b - ideal), b)
        ):
            mark = b if s.literal else b - 1
            strength = weight(pieces[mark], s.marks) if mark < n else None
            if strength is not None:
                value = 0.7 * strength + 0.3 * (1 - abs(ideal - b) / s.deviation)
                if value > score + 1e-12:
                    best, score = b, value
        out.append((at, best))
        at = best
    return out


@dataclass
class Reference:
    """A sequence in flight. `step` feeds one token and returns what was attended."""

    s: Settings
    pieces: list[str]
    """of the prompt without its last token"""
    K: list[Array]
    V: list[Array]
    chunks: list[tuple[int, int]] = field(default_factory=list)
    open: int = 0
    last: list[set[int]] = field(default_factory=list)
    """tokens selected at the last step, per KV head (union over its readers)"""

    def __post_init__(self) -> None:
        sinks = min(self.s.sinks, len(self.pieces))
        self.prompt = len(self.pieces) + 1
        self.sinks = sinks
        chunks = split(self.pieces, sinks, self.s)
        self.open = chunks[-1][0] if chunks else len(self.pieces)
        self.chunks = chunks[:-1]
        self.last = [set() for _ in range(self.K[0].shape[0])]

    def end(self, piece: str) -> None:
        """The step that fed `piece` has ended: the open chunk may close."""
        now, low, high = len(self.K), max(1, self.s.length - self.s.deviation), self.s.length + self.s.deviation
        stop = None
        if weight(piece, self.s.marks) is not None:
            at = now - 1 if self.s.literal else now
            if low <= at - self.open <= high:
                stop = at
        if stop is None and now - self.open >= high:
            stop = self.open + high
        if stop is not None:
            self.chunks.append((self.open, stop))
            self.open = stop

    def bound(self, q: Array, head: int, chunk: tuple[int, int]) -> float:
        rows = np.array([self.K[t][head] for t in range(*chunk)])
        return sum(max(q[d] * rows[:, d].max(), q[d] * rows[:, d].min()) for d in range(len(q)))

    def quota(self) -> int:
        """Tokens of closed chunks per reader; the fed token is in K already."""
        if not self.s.usage:
            return self.s.quota
        share = self.prompt if self.s.of == "prompt" else len(self.K)
        return max(0, math.ceil(round(self.s.usage * share, 9)) - self.sinks - (len(self.K) - self.open))

    def step(self, k: Array, v: Array, q: Array) -> tuple[list[list[set[int]]], Array, list[int], list[int]]:
        """k, v [H_kv, D], q [H, D] -> tokens selected [KV head][query head of its group], outputs [H, D], per KV head
        tokens wanted and tokens of them that the last step had selected too."""
        self.K.append(k)
        self.V.append(v)
        heads, kv_heads, d = len(q), k.shape[0], k.shape[1]
        group = heads // kv_heads
        chosen: list[list[set[int]]] = []
        out = np.zeros((heads, d))
        for g in range(kv_heads):
            raw = np.array([[self.bound(q[h], g, c) for c in self.chunks] for h in range(g * group, (g + 1) * group)])
            if not self.chunks:
                readers = [np.zeros(0)] * group
            elif self.s.group == "native":
                readers = list(raw)
            elif self.s.group == "max":
                readers = [raw.max(0)] * group
            else:
                scaled = raw / math.sqrt(d) if self.s.scaled else raw
                p = np.exp(scaled - scaled.max(1, keepdims=True))
                readers = [(p / p.sum(1, keepdims=True)).mean(0)] * group
            sets = []
            for score in readers:
                tokens = [(-score[i], t) for i, c in enumerate(self.chunks) for t in range(*c)]
                sets.append({t for _, t in sorted(tokens)[: self.quota()]})
            chosen.append(sets)
            for i, tokens in enumerate(sets):
                h = g * group + i
                seen = sorted({*range(self.sinks), *tokens, *range(self.open, len(self.K))})
                logits = np.array([self.K[t][g] @ q[h] for t in seen]) / math.sqrt(d)
                p = np.exp(logits - logits.max())
                out[h] = p / p.sum() @ np.array([self.V[t][g] for t in seen])
        wanted = [set().union(*sets) for sets in chosen]
        reusable = [len(now & before) for now, before in zip(wanted, self.last, strict=True)]
        self.last = wanted
        return chosen, out, [len(w) for w in wanted], reusable
