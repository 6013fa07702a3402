"""FreeKV's tensor maths: page summaries, page scores, what a group agrees on, query similarity.

Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, P rows of the summary table, R pages selected.
"""

from __future__ import annotations

import torch


def summarise(keys: torch.Tensor, page: int) -> torch.Tensor:
    """Smallest and largest value of each key dimension per page: keys [..., m * page, D] -> [..., m, 2, D] (sec. 3.2)."""
    paged = keys.unflatten(-2, (-1, page))
    return torch.stack((paged.amin(-2), paged.amax(-2)), -2)


def bound(q: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """Largest q . k a key within a page's limits could reach, sum over d of max(q_d min_d, q_d max_d): q [H_kv, G, D], summary
    [H_kv, P, 2, D] -> [H_kv, G, P]. A positive q_d takes the largest value, a negative one the smallest."""
    low, high = summary.unbind(-2)
    return q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)


def page_scores(q: torch.Tensor, summary: torch.Tensor, candidate: torch.Tensor, pooling: str, scale: float) -> torch.Tensor:
    """What pages are ranked by: q [Hq, D], summary [H_kv, P, 2, D], candidate bool [P] -> [H_kv, P], -inf where no candidate.

    pooling: one of freekv_params.POOLINGS (app. B.2). `scale` multiplies the bounds.
    """
    summary = summary.float()
    grouped = q.float().unflatten(0, (summary.shape[0], -1))
    how = "Max" if pooling.startswith("Max") else "Mean"
    what = pooling.removeprefix(how)

    def pool(x: torch.Tensor) -> torch.Tensor:
        return x.amax(1) if how == "Max" else x.mean(1)

    if what == "Q":
        grouped = pool(grouped)[:, None]
    scores = (bound(grouped, summary) * scale).masked_fill(~candidate, float("-inf"))
    if what == "S":
        scores = scores.softmax(-1).nan_to_num(0.0)
    return pool(scores).masked_fill(~candidate, float("-inf"))


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Rows of the `count` best pages per KV head, best first, the older page where two are equal: [H_kv, P] -> [H_kv, count], -1
    where there is no further candidate."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return order.masked_fill(scores.gather(-1, order) == float("-inf"), -1)


def similarity(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    """Cosine of this step's queries and the last step's (C_i, sec. 3.1), pooled over each group: [Hq, D] twice -> [H_kv]."""
    cosine = torch.cosine_similarity(q.float(), previous.float(), dim=-1).unflatten(0, (kv_heads, -1))
    return {"mean": cosine.mean, "max": cosine.amax, "min": cosine.amin}[pooling](-1)
