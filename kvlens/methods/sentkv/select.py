"""SentKVCompress's scores (sec. 4.2.1), as tensor operations of fixed shape.

Shapes: H_kv KV heads, G query heads per KV head, C rows of the chunk tables, D head size. Rows not in use have length
0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def extremes(keys: Tensor) -> Tensor:
    """Element-wise maxima, then minima, of a chunk's keys: [..., m, D] -> [..., 2 D]."""
    return torch.cat((keys.amax(-2), keys.amin(-2)), -1)


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
