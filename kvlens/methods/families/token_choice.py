"""Which tokens are read where a token counts as much as its chunk. Tensor operations of fixed shape.

Shapes: H_kv KV heads, R readers per KV head, C rows of the chunk tables. Rows not in use have length 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def take(score: Tensor, lengths: Tensor, quota: Tensor | int) -> Tensor:
    """Top-k over tokens, every token scored as its chunk (ties: the earlier token): how many leading tokens of each
    chunk are among the `quota` best. score [H_kv, R, C], lengths [C] -> [H_kv, R, C]. At most one chunk per reader is
    cut."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    length = lengths[order]
    offset = length.cumsum(-1) - length
    got = (quota - offset).clamp(min=0).minimum(length)
    return torch.zeros_like(order).scatter(-1, order, got)


def ranking(score: Tensor, tokens: Tensor) -> Tensor:
    """Chunk rows that are read by anyone, best first, -1 for the rest: score, tokens [H_kv, R, C] -> [H_kv, C]."""
    best = score.masked_fill(tokens == 0, -math.inf).amax(1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    return order.masked_fill(best.gather(-1, order) == -math.inf, -1)
