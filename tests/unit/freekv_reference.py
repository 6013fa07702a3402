"""FreeKV's decode steps written from the paper (sec. 3.2, 3.3, app. A, B) in float64 NumPy, slowly; imports nothing of
kvlens.

One layer. Keys and values are kept whole; nothing is moved, it is only worked out which pages would be. K, V [H_kv, n,
D] of the prompt; a step brings k, v [H_kv, D] and q [Hq, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass
class Settings:
    sinks: int
    window: int
    page: int
    selected_pages: int
    tau: float
    pooling: str = "MeanS"
    correction_pooling: str = "mean"
    scaled: bool = False
    window_rule: str = "average"
    reuse: bool = True


@dataclass
class Step:
    selected: list[list[int]]
    """per KV head, the pages chosen with this step's query, best first"""
    read: list[list[int]]
    """per KV head, the pages attended"""
    corrected: list[bool]
    similarity: list[float]
    """NaN at the first step"""
    blocking: list[list[int]]
    """per KV head, pages moved before the attention"""
    background: list[list[int]]
    positions: list[list[int]]
    """per KV head, attended positions in ascending order"""
    out: Array
    """[Hq, D]"""


class Layer:
    def __init__(self, K: Array, V: Array, settings: Settings) -> None:
        self.K, self.V, self.s = K.astype(float), V.astype(float), settings
        self.sinks = min(settings.sinks, K.shape[1])
        self.hot: list[set[int]] = [set() for _ in K]
        self.q: Array | None = None
        self.chosen: list[list[int]] = [[] for _ in K]

    def window_pages(self, tokens: int) -> int:
        """Full pages in the window beside the unfinished one (0 tokens when the last page is just complete)."""
        s, tail = self.s, (tokens - self.sinks) % self.s.page
        if s.window_rule == "average":  # one page fewer when the unfinished one is over half full
            most = s.window + s.page // 2
        elif s.window_rule == "at_least":
            most = s.window + s.page - 1
        else:
            most = s.window
        full = 0
        while tail + (full + 1) * s.page <= most and tail + (full + 1) * s.page <= tokens - self.sinks:
            full += 1
        return full

    def rank(self, head: int, q: Array, pages: list[int]) -> list[int]:
        s, D, scores = self.s, q.shape[1], {}
        how = np.max if s.pooling.startswith("Max") else np.mean
        group = [how(q, axis=0)] if s.pooling in ("MaxQ", "MeanQ") else list(q)
        table = np.zeros((len(group), len(pages)))
        for row, query in enumerate(group):
            for column, page in enumerate(pages):
                start = self.sinks + page * s.page
                keys = self.K[head, start : start + s.page]
                low, high = keys.min(0), keys.max(0)
                total = 0.0
                for d in range(D):
                    total += max(query[d] * low[d], query[d] * high[d])
                table[row, column] = total / math.sqrt(D) if s.scaled else total
        if s.pooling in ("MaxS", "MeanS"):
            table = np.exp(table - table.max(1, keepdims=True))
            table /= table.sum(1, keepdims=True)
        for column, page in enumerate(pages):
            scores[page] = how(table[:, column])
        return sorted(pages, key=lambda page: (-scores[page], page))[: s.selected_pages]

    def step(self, k: Array, v: Array, q: Array) -> Step:
        s, heads = self.s, len(self.K)
        self.K = np.concatenate([self.K, k[:, None]], 1)
        self.V = np.concatenate([self.V, v[:, None]], 1)
        tokens = self.K.shape[1]
        complete = (tokens - self.sinks) // s.page
        pages = list(range(complete - self.window_pages(tokens)))
        newest = list(range(self.sinks + len(pages) * s.page, tokens))
        grouped = q.reshape(heads, -1, q.shape[1])
        out = Step([], [], [], [], [], [], [], np.zeros(q.shape))
        for head in range(heads):
            selected = self.rank(head, grouped[head], pages)
            similarity = math.nan
            corrected = False
            if self.q is not None:
                last = self.q.reshape(grouped.shape)[head]
                cosines = [
                    float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
                    for a, b in zip(grouped[head], last, strict=True)
                ]
                similarity = {"mean": np.mean, "max": np.max, "min": np.min}[s.correction_pooling](cosines)
                corrected = s.tau == 1 or (s.tau > 0 and similarity < s.tau)
            block = corrected or self.q is None
            missing = [page for page in selected if not (s.reuse and page in self.hot[head])]
            if block:
                self.hot[head] = set(selected)
            read = selected if block else self.chosen[head]
            assert set(read) <= self.hot[head]
            positions = [*range(self.sinks)]
            for page in sorted(read):
                positions += range(self.sinks + page * s.page, self.sinks + (page + 1) * s.page)
            positions += newest
            for place, query in enumerate(grouped[head]):
                logits = self.K[head, positions] @ query / math.sqrt(q.shape[1])
                weight = np.exp(logits - logits.max())
                out.out[head * grouped.shape[1] + place] = weight @ self.V[head, positions] / weight.sum()
            self.hot[head] = set(selected)
            out.selected.append(selected)
            out.read.append(read)
            out.corrected.append(corrected)
            out.similarity.append(similarity)
            out.blocking.append(missing if block else [])
            out.background.append([] if block else missing)
            out.positions.append(positions)
        self.q, self.chosen = q.copy(), out.selected
        return out
