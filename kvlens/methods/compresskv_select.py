"""CompressKV's token selection (sec. 3.3) as tensor operations. H chosen heads, w window queries, n prompt tokens, D head size."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def token_scores(queries: torch.Tensor, keys: torch.Tensor, kernel: int) -> torch.Tensor:
    """How much the window attends to every token before it: queries [H, w, D] of the last w positions, keys [H, n, D] of the KV head
    of each -> float32 [n - w]. Softmax over all keys with a causal mask inside the window, summed over the window, averaged over
    `kernel` neighbouring positions (zeros beyond the ends), then over the heads.
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
