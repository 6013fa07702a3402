"""FreeKV's tensor maths: page summaries, their scores, what a group agrees on.

Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, P rows of the summary table.
"""

from __future__ import annotations

import torch

from kvlens.kernels import page_scores as kernel
from kvlens.kernels.page_scores import Pooling


def summarise(keys: torch.Tensor) -> torch.Tensor:
    """Smallest and largest value of each key dimension of a page: keys [..., page, D] -> [..., 2 D] (sec. 3.2)."""
    return torch.cat((keys.amin(-2), keys.amax(-2)), -1)


def page_scores(
    q: torch.Tensor, summary: torch.Tensor, pages: torch.Tensor, pooling: Pooling, scale: float
) -> torch.Tensor:
    """Rank pages: q [H_kv, G, D], summary [H_kv, P, 2 D] as stored -> scores [H_kv, P]. pages int64 0-d: how many of
    the P places are in use, from the first on; the others have -inf. scale: multiplies the bounds. With MeanS and MaxS
    a score is the logarithm (app. B.2; kernels/page_scores.py)."""
    low, high = summary[None].chunk(2, -1)
    return kernel.page_scores(q.flatten(0, 1)[None], low, high, pages, pooling, scale)[0]


def published(scores: torch.Tensor, pooling: str) -> torch.Tensor:
    """Scores of `page_scores` on the paper's scale: shares for MeanS and MaxS, the others as they are."""
    return scores.exp() if pooling.endswith("S") else scores
