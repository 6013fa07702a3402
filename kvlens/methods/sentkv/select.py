"""SentKVCompress's scores (sec. 4.2.1), as tensor operations of fixed shape.

Shapes: H_kv KV heads, G query heads per KV head, C rows of the chunk tables, D head size. Rows not in use have length
0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlens.kernels.choice import backend
from kvlens.kernels.page_scores import Pooling, fits, page_scores_triton

KERNELS: dict[str, Pooling] = {"max": "MaxQK", "mean": "MeanS"}
"""how k2 pools what a group agrees on by; MeanS gives the logarithm"""


def extremes(keys: Tensor) -> Tensor:
    """Element-wise maxima, then minima, of a chunk's keys: [..., m, D] -> [..., 2 D]."""
    return torch.cat((keys.amax(-2), keys.amin(-2)), -1)


def scores(q: Tensor, extreme: Tensor, alive: Tensor, group: str, scale: float) -> Tensor:
    """Scores of the readers, as `pool` has them, of q [H_kv, G, D] and extreme [H_kv, C, 2 D] as they are stored. On
    CUDA the products and the pooling are k2's (kernels/page_scores.py), but for 'native'."""
    if group in KERNELS and backend(q) == "triton" and fits(q.shape[-1]):
        high, low = extreme[None].chunk(2, -1)
        able = alive.expand(1, len(extreme), -1)
        pooling = KERNELS[group]
        pooled = page_scores_triton(q.flatten(0, 1)[None], low, high, able, pooling, 1.0 if group == "max" else scale)
        return (pooled.exp().masked_fill(~alive, -math.inf) if pooling == "MeanS" else pooled)[0, :, None]
    return pool(bounds(q.float(), extreme.float()), alive, group, scale)


def bounds(q: Tensor, extreme: Tensor) -> Tensor:
    """What q . k can reach at most for a key between a chunk's extremes, sum over d of max(q_d M_d, q_d m_d): q [H_kv,
    G, D], extreme [H_kv, C, 2 D], both float32 -> [H_kv, G, C]."""
    high, low = extreme.chunk(2, -1)
    return q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)


def pool(bound: Tensor, alive: Tensor, group: str, scale: float) -> Tensor:
    """Scores of the readers [H_kv, R, C], R = G for 'native', else 1; -inf for rows not in use. bound [H_kv, G, C],
    alive [C] bool."""
    masked = bound.masked_fill(~alive, -math.inf)
    if group == "native":
        return masked
    if group == "max":
        return masked.amax(1, keepdim=True)
    return (masked * scale).softmax(-1).nan_to_num(0.0).mean(1, keepdim=True).masked_fill(~alive, -math.inf)
