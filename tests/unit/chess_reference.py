"""CHESS written from the paper and evidence/chess.md in float64 NumPy, slowly, one unit at a time; imports nothing of
kvlens.

K, V [L, H_kv, n, D] of all tokens so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass
class Settings:
    page: int
    chunk_pages: int
    grid_chunks: int
    window: int
    sinks: int
    ratios: tuple[float, float, float]
    older: bool
    literal: bool
    by_layer: bool
    trigger: str
    interval: int
    both: bool
    token_varentropy: bool
    max_interval: int
    thresholds: tuple[float, float]
    anchor_tail: bool
    keep: float = 0.0
    printed: bool = False


@dataclass
class Outcome:
    """Units kept, and the scores of all units in the hierarchy, by unit number."""

    grids: set[int]
    chunks: set[int]
    pages: set[int]
    scores: dict[str, dict[int, float]]


@dataclass
class Chess:
    """State between steps: which pages are selected, how many were completed since."""

    s: Settings
    prompt: int
    selected: set[int] = field(default_factory=set)
    outcome: Outcome | None = None
    since: int = 0
    entropies: list[tuple[float, float]] = field(default_factory=list)
    why: int = 0
    judged: tuple[float, float] = (math.nan, math.nan)

    def vector(self, keys: Array, start: int, stop: int) -> Array:
        """Eq. 1 over positions [start, stop)."""
        blocks = []
        for layer in range(keys.shape[0]):
            block = np.concatenate([keys[layer, head, start:stop].mean(0) for head in range(keys.shape[1])])
            blocks.append(block / np.linalg.norm(block) if self.s.by_layer else block)
        return np.concatenate(blocks)

    def begin(self, keys: Array) -> None:
        """End of prefill."""
        if keys.shape[2] // self.s.page:
            self.reconstruct(keys)

    def reconstruct(self, keys: Array) -> None:
        s, tokens = self.s, keys.shape[2]
        complete = tokens // s.page
        vectors = [self.vector(keys, j * s.page, (j + 1) * s.page) for j in range(complete)]
        window = max(0, complete - s.window)
        recent = vectors[window:]
        if s.anchor_tail and tokens % s.page:
            recent = [*recent, self.vector(keys, complete * s.page, tokens)]
        anchor = sum(recent) / len(recent)
        members = list(range(s.sinks, window)) if s.older else list(range(complete))
        chunks: dict[int, list[Array]] = {}
        for j in members:
            chunks.setdefault(j // s.chunk_pages, []).append(vectors[j])
        chunk_vectors = {c: sum(rows) / (s.chunk_pages if s.printed else len(rows)) for c, rows in chunks.items()}
        grids: dict[int, list[Array]] = {}
        for c, row in chunk_vectors.items():
            grids.setdefault(c // s.grid_chunks, []).append(row)
        grid_vectors = {g: sum(rows) / (s.grid_chunks if s.printed else len(rows)) for g, rows in grids.items()}
        scores = {
            "grid": {g: float(anchor @ v) for g, v in grid_vectors.items()},
            "chunk": {c: float(anchor @ v) for c, v in chunk_vectors.items()},
            "page": {j: float(anchor @ vectors[j]) for j in members},
        }
        ratios, count = s.ratios, None
        if s.keep:
            count = max(1, int(s.keep * tokens + 1e-9 - (s.sinks + s.window + 1) * s.page) // s.page)
            ratios = (min(1.0, count / max(1, len(members))) ** (1 / 3),) * 3
        kept_grids = self.best(scores["grid"], set(scores["grid"]), ratios[0])
        kept_chunks = self.best(
            scores["chunk"], {c for c in scores["chunk"] if c // s.grid_chunks in kept_grids}, ratios[1]
        )
        under = {j for j in scores["page"] if j // s.chunk_pages in kept_chunks}
        kept_pages = self.best(scores["page"], under, ratios[2], count)
        self.outcome = Outcome(kept_grids, kept_chunks, kept_pages, scores)
        self.selected, self.since = kept_pages, 0

    def best(self, scores: dict[int, float], active: set[int], ratio: float, count: int | None = None) -> set[int]:
        if self.s.literal:
            if not scores:
                return set()
            threshold = np.quantile([value if unit in active else 0.0 for unit, value in scores.items()], 1 - ratio)
            return {unit for unit in active if scores[unit] >= threshold}
        most = max(1, math.ceil(ratio * len(active) - 1e-9)) if count is None else count
        return set(sorted(active, key=lambda unit: (-scores[unit], unit))[:most])

    def end_step(self, keys: Array, entropy: float, varentropy: float) -> None:
        """A token was fed; keys include it. A page may have been completed."""
        s, tokens = self.s, keys.shape[2]
        self.entropies.append((entropy, varentropy))
        self.why = 0
        if tokens % s.page:
            return
        self.since += 1
        self.judged = (math.nan, math.nan)
        if tokens - s.page >= self.prompt:
            last = np.array(self.entropies[-s.page :])
            self.judged = float(last[:, 0].mean()), float(last[:, 1].mean() if s.token_varentropy else last[:, 0].var())
        high = [value > threshold for value, threshold in zip(self.judged, s.thresholds, strict=True)]
        if s.trigger == "dynamic":
            self.why = (
                1
                if (all(high) if s.both else any(high))
                else 2
                if s.max_interval and self.since >= s.max_interval
                else 0
            )
        elif s.trigger == "every" or (s.trigger == "fixed" and self.since >= s.interval):
            self.why = 2
        if self.why:
            self.reconstruct(keys)

    def attended(self, complete: int, tokens: int) -> list[int]:
        """Positions attended when `complete` pages were complete at the beginning of the step and `tokens` tokens are
        in memory."""
        s = self.s
        left = max(0, complete - s.window)
        pages = {j for j in range(left) if j < s.sinks or j in self.selected}
        return [t for t in range(tokens) if t >= left * s.page or t // s.page in pages]


def attention(keys: Array, values: Array, q: Array, positions: list[int]) -> Array:
    """One layer: keys, values [H_kv, n, D], q [H, D] -> [H, D]."""
    group = q.shape[0] // keys.shape[0]
    out = []
    for head, query in enumerate(q):
        logits = keys[head // group, positions] @ query / math.sqrt(query.shape[0])
        p = np.exp(logits - logits.max())
        out.append(p / p.sum() @ values[head // group, positions])
    return np.array(out)
