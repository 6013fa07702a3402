"""Which tokens are read where a token counts as much as its chunk. Tensor operations of fixed shape.

Shapes: H_kv KV heads, R readers per KV head, C rows of the chunk tables. Rows not in use have length 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlens.kernels.best_rows import best_rows
from kvlens.kernels.chunk_reads import chunk_reads


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


def choose(score: Tensor, lengths: Tensor, quota: Tensor, first_id: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is read at a step: score [H_kv, R, C], lengths [C], quota int64 [1] as `take`; first_id: span id of row 0;
    group: query heads of a KV head -> leading tokens of each span [H_kv, G, S], spans of which any are read bool
    [H_kv, G, S], ids of these int64 [H_kv, C], best first, -1 behind them."""
    heads, readers, rows = score.shape
    if readers == 1:
        reads = chunk_reads(best_rows(score[:, 0], rows), lengths, quota, first_id)
        tokens, fine = (x[:, None].expand(-1, group, -1) for x in (reads.tokens, reads.fine))
        return tokens, fine, reads.wishes
    selected = take(score, lengths, quota)
    ranked = ranking(score, selected)
    tokens = selected.new_zeros(heads, group, first_id + rows)
    tokens[:, :, first_id:] = selected
    return tokens, tokens > 0, torch.where(ranked < 0, ranked, ranked + first_id)
