"""FreeKV's tensor maths: page summaries, page scores, what a group agrees on, query similarity.

Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, P rows of the summary table.
"""

from __future__ import annotations

import math

import torch


def summarise(keys: torch.Tensor) -> torch.Tensor:
    """Smallest and largest value of each key dimension of a page: keys [..., page, D] -> [..., 2 D] (sec. 3.2)."""
    return torch.cat((keys.amin(-2), keys.amax(-2)), -1)


def bound(q: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """Largest q . k a key within a page's limits could reach, sum over d of max(q_d min_d, q_d max_d): q [H_kv, G, D],
    summary [H_kv, P, 2 D] -> [H_kv, G, P]. A positive q_d takes the largest value, a negative one the smallest."""
    low, high = summary.chunk(2, -1)
    return q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)


def page_scores(
    q: torch.Tensor, summary: torch.Tensor, candidate: torch.Tensor, pooling: str, scale: float
) -> torch.Tensor:
    """What pages are ranked by: q [H_kv, G, D], summary [H_kv, P, 2 D], both float32, candidate bool [P] -> [H_kv, P],
    -inf where no candidate.

    pooling: one of freekv_params.POOLINGS (app. B.2); of MeanS and MaxS the logarithm, since unscaled scores make
    softmax of float32 underflow, and pages would be ranked by nothing. `scale` multiplies the bounds.
    """
    mean = pooling.startswith("Mean")
    if pooling.endswith("Q"):
        q = q.mean(1, keepdim=True) if mean else q.amax(1, keepdim=True)
    scores = (bound(q, summary) * scale).masked_fill(~candidate, float("-inf"))
    if pooling.endswith("S"):
        scores = scores.log_softmax(-1).masked_fill(~candidate, float("-inf"))
        pooled = scores.logsumexp(1) - math.log(scores.shape[1]) if mean else scores.amax(1)
    else:
        pooled = scores.mean(1) if mean else scores.amax(1)
    return pooled.masked_fill(~candidate, float("-inf"))


def published(scores: torch.Tensor, pooling: str) -> torch.Tensor:
    """Scores of `page_scores` on the paper's scale: shares for MeanS and MaxS, the others as they are."""
    return scores.exp() if pooling.endswith("S") else scores


def similarity(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    """Cosine of this step's queries and the last step's (C_i, sec. 3.1), pooled over each group: [Hq, D] twice ->
    [H_kv]."""
    cosine = torch.cosine_similarity(q.float(), previous.float(), dim=-1).unflatten(0, (kv_heads, -1))
    return {"mean": cosine.mean, "max": cosine.amax, "min": cosine.amin}[pooling](-1)
