"""SeKV's attention with one part replaced by what only an oracle knows, to tell which part loses an answer.

The answer's tokens are fed at once behind a prompt that was read before; every one of them attends as a decode step
would that starts from an empty recall zone. Exact match is then that of greedy decoding, since a greedy answer is right
as long as every token of it is the likeliest one. Spans are exact, not factors. Shapes: Hq query heads, H_kv KV heads,
G = Hq / H_kv, m tokens fed, n prompt tokens, S spans, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlens.engine.prefill import ReadPrompt
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.spans import pieces
from kvlens.shape import KVShape
from kvlens.spans import Span


@dataclass(frozen=True)
class Oracle:
    """What an arm does. score: eq5 (pca) | mean | mass (the true one) | bound. needle: layers in which the needle's
    spans are expanded whatever the score says. coarse: mean (eq. 9's log|S|) | second (plus q' Sigma q / 2) | true
    (the mass that the span really has) | true+values (and its true mean value) | none."""

    score: str = "eq5"
    rate: float = 0.05
    needle: range = range(0)
    exact: range = range(0)
    coarse: str = "mean"
    everything: bool = False
    """full attention"""
    other_room: bool = False
    """room for as many expanded tokens as the budget would leave with coarse entries where there are none, and without
    where there are some"""


class OracleSession:
    """What the seam with transformers needs of a session (kvlens.engine.hf_attention)."""

    def __init__(
        self,
        shape: KVShape,
        read: ReadPrompt,
        spans: list[Span],
        room: int,
        needle: Tensor,
        arm: Oracle,
        sizes: tuple[int, int],
    ) -> None:
        """spans: that can be expanded; room: tokens of a KV head's recall zone; needle bool [S]; sizes: dim, piece."""
        self.shape, self.read, self.arm, self.room, self.needle = shape, read, arm, room, needle
        self.n = read.keys.shape[2]
        self.length = torch.tensor([len(span) for span in spans], dtype=torch.float32)
        self.owner = torch.full((self.n,), -1)
        for place, span in enumerate(spans):
            self.owner[span.tok_start : span.tok_end] = place
        self.inside = self.owner >= 0
        self.of = self.owner[self.inside]
        nats = read.surprisal.whole()[: self.n].nan_to_num(0.0)
        ranges = [(span.tok_start, span.tok_end) for span in spans]
        self.mean_keys = sekv_router.span_means(read.keys, nats, ranges)
        self.mean_values = sekv_router.span_means(read.values, nats, ranges)
        self.new: dict[int, tuple[Tensor, Tensor]] = {}
        if arm.score == "eq5":
            self.weight = sekv_router.fit_pca(read.keys, shape.group, sizes[0])
            self.summary = sekv_router.summaries(self.weight, self.mean_keys)
        if arm.score == "bound":
            cuts = [pieces(*total, sizes[1]) for total in ranges]
            self.part_of = torch.tensor([place for place, parts in enumerate(cuts) for _ in parts])
            kept_tokens = sekv_router.ranges_of_keys(read.keys, [part for parts in cuts for part in parts])
            self.bounds, self.scale = sekv_router.to_bytes(kept_tokens)
        self.ends = torch.tensor([span.tok_end for span in spans])

    def tokens_seen(self, layer: int) -> int:
        return self.n

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.new[layer] = keys, values

    def attend(self, layer: int, q: Tensor, scaling: float) -> Tensor:
        """q [1, Hq, m, D] -> output of the same shape."""
        arm, query, n = self.arm, q[0], self.n
        keys, values = (
            self._heads(torch.cat((old[layer], new), 1))
            for old, new in zip((self.read.keys, self.read.values), self.new[layer], strict=True)
        )
        m = query.shape[1]
        logits = query @ keys.mT * scaling
        logits[..., n:] += torch.full((m, m), -math.inf).triu(1)
        if arm.everything or layer in arm.exact:
            return (logits.softmax(-1) @ values)[None]
        fine = self._expanded(layer, query, logits[..., :n], scaling)
        read = torch.ones(*logits.shape[:2], n, dtype=torch.bool)
        read[..., self.inside] = fine[..., self.of]
        exact = torch.cat((logits[..., :n].masked_fill(~read, -math.inf), logits[..., n:]), -1)
        coarse = self._coarse(layer, query, logits[..., :n], scaling).masked_fill(fine, -math.inf)
        mass = torch.cat((exact, coarse), -1).softmax(-1)
        tokens, entries = mass[..., : n + m], mass[..., n + m :]
        if arm.coarse == "true+values":
            share = logits[..., :n][..., self.inside] - self._true_mass(logits[..., :n])[..., self.of]
            spread = share.exp() * entries[..., self.of]
            return (tokens @ values + spread @ values[:, :n][:, self.inside])[None]
        return (tokens @ values + entries @ self._heads(self.mean_values[layer]))[None]

    def _heads(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.shape.group, 0)

    def _true_mass(self, logits: Tensor) -> Tensor:
        """Log-sum-exp of every span: logits [Hq, m, n] -> [Hq, m, S]."""
        rows = logits[..., self.inside]
        index = self.of.expand_as(rows)
        top = torch.full((*rows.shape[:-1], len(self.length)), -math.inf).scatter_reduce(-1, index, rows, "amax")
        return top + torch.zeros_like(top).index_add(-1, self.of, (rows - top[..., self.of]).exp()).log()

    def _coarse(self, layer: int, query: Tensor, logits: Tensor, scaling: float) -> Tensor:
        """Logits of the coarse entries [Hq, m, S]."""
        plain = query @ self._heads(self.mean_keys[layer]).mT * scaling + self.length.log()
        if self.arm.coarse == "none":
            return torch.full_like(plain, -math.inf)
        if self.arm.coarse.startswith("true"):
            return self._true_mass(logits)
        if self.arm.coarse == "second":
            rows, none = logits[..., self.inside], torch.zeros_like(plain)
            start, square = (none.index_add(-1, self.of, x) / self.length for x in (rows, rows.square()))
            return plain + (square - start.square()).clamp_min(0) / 2
        return plain

    def _score(self, layer: int, query: Tensor, logits: Tensor, scaling: float) -> Tensor:
        alive = torch.ones(len(self.length), dtype=torch.bool)
        if self.arm.score == "eq5":
            routed = sekv_router.route(self.weight[layer], query)
            return sekv_router.scores(routed, self.summary[layer], self.length, alive)
        if self.arm.score == "bound":
            return sekv_router.bound_scores(
                query, self.bounds[layer], self.scale[layer], self.part_of, len(self.length)
            )
        if self.arm.score == "mass":
            return self._true_mass(logits)
        return query @ self._heads(self.mean_keys[layer]).mT * scaling + self.length.log()

    def _expanded(self, layer: int, query: Tensor, logits: Tensor, scaling: float) -> Tensor:
        """Spans that are read token by token, bool [Hq, m, S]: as many as fit, in the order of the group's largest
        score."""
        arm, group = self.arm, self.shape.group
        score = self._score(layer, query, logits, scaling)
        request = torch.ones_like(score, dtype=torch.bool)
        if arm.rate < 1:
            previous = self.read.last_queries[layer]
            visited = torch.arange(self.n - previous.shape[1], self.n)[:, None] >= self.ends
            past = self._score(layer, previous, previous @ self._heads(self.read.keys[layer]).mT * scaling, scaling)
            threshold = sekv_router.fit_threshold(past.masked_fill(~visited, -math.inf), arm.rate)
            request = sekv_router.expand(score, threshold)
        any_asked = request.unflatten(0, (-1, group)).any(1)
        best = score.unflatten(0, (-1, group)).amax(1).masked_fill(~any_asked, -math.inf)
        ranked = best.sort(-1, descending=True)
        hot, remaining = torch.zeros_like(any_asked), torch.full(best.shape[:2], float(self.room))
        for place in range(len(self.length)):
            span = ranked.indices[..., place]
            fits = (ranked.values[..., place] > -math.inf) & (self.length[span] <= remaining)
            hot.scatter_(-1, span[..., None], fits[..., None])
            remaining -= self.length[span] * fits
        if layer in arm.needle:
            hot, request = hot | self.needle, request | self.needle
        return hot.repeat_interleave(group, 0) & request
