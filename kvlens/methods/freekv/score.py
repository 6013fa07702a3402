"""FreeKV's tensor maths: page summaries, page scores, what a group agrees on, query similarity.

Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, P rows of the summary table, R pages selected.
"""

from __future__ import annotations

import math

import torch


def summarise(keys: torch.Tensor, page: int) -> torch.Tensor:
    """Smallest and largest value of each key dimension per page: keys [..., m * page, D] -> [..., m, 2, D] (sec.
    3.2)."""
    paged = keys.unflatten(-2, (-1, page))
    return torch.stack((paged.amin(-2), paged.amax(-2)), -2)


def bound(q: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """Largest q . k a key within a page's limits could reach, sum over d of max(q_d min_d, q_d max_d): q [H_kv, G, D],
    summary [H_kv, P, 2, D] -> [H_kv, G, P]. A positive q_d takes the largest value, a negative one the smallest."""
    low, high = summary.unbind(-2)
    return q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)


def page_scores(
    q: torch.Tensor, summary: torch.Tensor, candidate: torch.Tensor, pooling: str, scale: float
) -> torch.Tensor:
    """What pages are ranked by: q [Hq, D], summary [H_kv, P, 2, D], candidate bool [P] -> [H_kv, P], -inf where no
    candidate.

    pooling: one of freekv_params.POOLINGS (app. B.2); of MeanS and MaxS the logarithm, since unscaled scores make
    softmax of float32 underflow, and pages would be ranked by nothing. `scale` multiplies the bounds.
    """
    summary, grouped = summary.float(), q.float().unflatten(0, (summary.shape[0], -1))
    mean = pooling.startswith("Mean")
    if pooling.endswith("Q"):
        grouped = grouped.mean(1, keepdim=True) if mean else grouped.amax(1, keepdim=True)
    scores = (bound(grouped, summary) * scale).masked_fill(~candidate, float("-inf"))
    if pooling.endswith("S"):
        scores = scores.log_softmax(-1).masked_fill(~candidate, float("-inf"))
        pooled = scores.logsumexp(1) - math.log(scores.shape[1]) if mean else scores.amax(1)
    else:
        pooled = scores.mean(1) if mean else scores.amax(1)
    return pooled.masked_fill(~candidate, float("-inf"))


def published(scores: torch.Tensor, pooling: str) -> torch.Tensor:
    """Scores of `page_scores` on the paper's scale: shares for MeanS and MaxS, the others as they are."""
    return scores.exp() if pooling.endswith("S") else scores


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Rows of the `count` best pages per KV head, best first, the older page where two are equal: [H_kv, P] -> [H_kv,
    count], -1 where there is no further candidate."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return order.masked_fill(scores.gather(-1, order) == float("-inf"), -1)


def similarity(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    """Cosine of this step's queries and the last step's (C_i, sec. 3.1), pooled over each group: [Hq, D] twice ->
    [H_kv]."""
    cosine = torch.cosine_similarity(q.float(), previous.float(), dim=-1).unflatten(0, (kv_heads, -1))
    return {"mean": cosine.mean, "max": cosine.amax, "min": cosine.amin}[pooling](-1)
