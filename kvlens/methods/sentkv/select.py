"""SentKVCompress's scores and token selection (sec. 4.2.1), as tensor operations of fixed shape.

Shapes: H_kv KV heads, G query heads per KV head, C rows of the chunk tables, D head size. Rows not in use have length
0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def extremes(keys: Tensor, edges: list[tuple[int, int]], start: int) -> tuple[Tensor, Tensor]:
    """Element-wise maxima and minima [..., len(edges), D] of keys [..., m, D], the tokens from `start` on, over ranges
    of positions."""
    parts = [keys[..., a - start : b - start, :] for a, b in edges]
    return torch.stack([x.amax(-2) for x in parts], -2), torch.stack([x.amin(-2) for x in parts], -2)


def bounds(q: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """What q . k can reach at most for a key between a chunk's extremes, sum over d of max(q_d M_d, q_d m_d): q [H_kv,
    G, D], high and low [H_kv, C, D] -> [H_kv, G, C]."""
    q = q.float()
    return q.clamp(min=0) @ high.float().transpose(-1, -2) + q.clamp(max=0) @ low.float().transpose(-1, -2)


def pool(bound: Tensor, alive: Tensor, group: str, scale: float) -> Tensor:
    """Scores of the readers [H_kv, R, C], R = G for 'native', else 1; -inf for rows not in use. bound [H_kv, G, C],
    alive [C] bool."""
    masked = bound.masked_fill(~alive, -math.inf)
    if group == "native":
        return masked
    if group == "max":
        return masked.amax(1, keepdim=True)
    return (masked * scale).softmax(-1).nan_to_num(0.0).mean(1, keepdim=True).masked_fill(~alive, -math.inf)


def take(score: Tensor, lengths: Tensor, quota: Tensor | int) -> Tensor:
    """Top-k over tokens, every token scored as its chunk (ties: the earlier token): how many leading tokens of each
    chunk are among the `quota` best. score [H_kv, R, C], lengths [C] -> [H_kv, R, C]. At most one chunk per reader is
    cut."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    length = lengths[order]
    before = length.cumsum(-1) - length
    got = (quota - before).clamp(min=0).minimum(length)
    return torch.zeros_like(order).scatter(-1, order, got)


def ranking(score: Tensor, tokens: Tensor) -> Tensor:
    """Chunk rows that are read by anyone, best first, -1 for the rest: score, tokens [H_kv, R, C] -> [H_kv, C]."""
    best = score.masked_fill(tokens == 0, -math.inf).amax(1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    return order.masked_fill(best.gather(-1, order) == -math.inf, -1)
