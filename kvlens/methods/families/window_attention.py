"""What the last prompt tokens attend to: the score that several prompt evictions share, as tensor operations.

Shapes: H query heads, w window queries, n prompt tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from kvlens.methods.run_inputs import Peeked


class Observed(Protocol):
    """A prompt after prefill: its keys [L, H_kv, n, D] and last queries [L, Hq, w, D]."""

    @property
    def keys(self) -> torch.Tensor: ...
    @property
    def last_queries(self) -> torch.Tensor: ...


def observed(
    prompt: Observed, layer: int, heads: Sequence[int], group: int, inside: int, peeked: Peeked | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The window's queries [H, w, D] of some query heads and the keys [H, n, D] they see: the window is the last
    `inside` tokens that prefill covered and, unless it is None, the peeked one after them."""
    head_index = torch.tensor(heads, device=prompt.keys.device)
    queries, keys = (
        prompt.last_queries[layer, head_index, prompt.last_queries.shape[2] - inside :],
        prompt.keys[layer, head_index // group],
    )
    if peeked is not None:
        queries = torch.cat([queries, peeked.queries[layer, head_index]], 1)
        keys = torch.cat([keys, peeked.keys[layer, head_index // group]], 1)
    return queries, keys


def paid(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Attention that each query of the window pays: queries [H, w, D] of the last w positions, keys [H, n, D] of the KV
    head of each -> float32 [H, w, n]. Softmax over all keys with a causal mask inside the window."""
    w, n = queries.shape[1], keys.shape[1]
    scores = queries.float() @ keys.float().transpose(-1, -2) * keys.shape[-1] ** -0.5
    unseen = torch.ones(w, n, dtype=torch.bool, device=keys.device).triu(n - w + 1)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1)


def received(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Attention that the window gives every token before it, summed over the window: float32 [H, n - w]; shapes as
    `paid`."""
    return paid(queries, keys)[:, :, : keys.shape[1] - queries.shape[1]].sum(1)


def pooled(scores: torch.Tensor, kernel: int, how: str) -> torch.Tensor:
    """scores [H, m] over `kernel` neighbouring positions, an odd number: 'avg' (zeros beyond the ends) or 'max'."""
    if kernel == 1 or not scores.shape[-1]:
        return scores
    pool = F.avg_pool1d if how == "avg" else F.max_pool1d
    return pool(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def grouped(scores: torch.Tensor, group: int, how: str) -> torch.Tensor:
    """scores [H_kv * group, m] of query heads -> [H_kv, m]: 'mean', 'max' or 'sum' over each KV head's group."""
    wide = scores.unflatten(0, (-1, group))
    return wide.amax(1) if how == "max" else wide.sum(1) if how == "sum" else wide.mean(1)
