"""CompressKV's token selection (sec. 3.3) as tensor operations. H chosen heads, w window queries, n prompt tokens, D
head size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from kvlens.methods.base import Peeked


class Observed(Protocol):
    """A prompt after prefill: its keys [L, H_kv, n, D] and last queries [L, Hq, w, D]."""

    @property
    def keys(self) -> torch.Tensor: ...
    @property
    def last_queries(self) -> torch.Tensor: ...


def prompt_scores(
    prompt: Observed, layer: int, heads: Sequence[int], group: int, inside: int, peeked: Peeked | None, kernel: int
) -> torch.Tensor:
    """`token_scores` of one layer by its query heads `heads`: the window is the last `inside` tokens that prefill
    covered and, unless it is None, the peeked one after them -> float32 [n - inside], n without the peeked token."""
    of = torch.tensor(heads, device=prompt.keys.device)
    queries, keys = (
        prompt.last_queries[layer, of, prompt.last_queries.shape[2] - inside :],
        prompt.keys[layer, of // group],
    )
    if peeked is not None:
        queries, keys = (
            torch.cat([queries, peeked.queries[layer, of]], 1),
            torch.cat([keys, peeked.keys[layer, of // group]], 1),
        )
    return token_scores(queries, keys, kernel)


def token_scores(queries: torch.Tensor, keys: torch.Tensor, kernel: int) -> torch.Tensor:
    """How much the window attends to every token before it: queries [H, w, D] of the last w positions, keys [H, n, D]
    of the KV head of each -> float32 [n - w]. Softmax over all keys with a causal mask inside the window, summed over
    the window, averaged over `kernel` neighbouring positions (zeros beyond the ends), then over the heads.
    """
    w, n = queries.shape[1], keys.shape[1]
    scores = queries.float() @ keys.float().transpose(-1, -2) * keys.shape[-1] ** -0.5
    unseen = torch.ones(w, n, dtype=torch.bool, device=keys.device).triu(n - w + 1)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    received = weights[:, :, : n - w].sum(1)
    if n == w:
        return received.mean(0)
    return F.avg_pool1d(received, kernel, stride=1, padding=kernel // 2).mean(0)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the `count` largest of scores [m] in ascending order, the earlier first among equals."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values
