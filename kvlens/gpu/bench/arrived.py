"""Drawn spans that factors bring into a recall zone, and the zone's cells, for the arrivals' check and times."""

from __future__ import annotations

import dataclasses

import torch

ITEM = 2
"""bytes of a number"""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """As kernels/arrivals.py takes them: came bool [H, S]; meta int64 [H, S, 4]; new keys and values [2, H, A, T, D];
    span, offset int64, fill bool [H, M]; keys and values of the cells [2, H, M, D]."""

    came: torch.Tensor
    meta: torch.Tensor
    new: torch.Tensor
    span: torch.Tensor
    offset: torch.Tensor
    fill: torch.Tensor
    cells: torch.Tensor


def drawn(heads: int, spans: int, places: int, longest: int, dim: int) -> Drawn:
    """On the CPU. Spans of half of `longest` tokens to all of them; some come for every KV head but for one, one has as
    many as there are places; their tokens lie anywhere among cells that stay."""
    came, meta = torch.zeros(heads, spans, dtype=torch.bool), torch.zeros(heads, spans, 4, dtype=torch.long)
    meta[..., 0] = torch.arange(heads * spans).view(heads, spans) * 1000
    meta[..., 1] = torch.randint(longest // 2, longest + 1, (heads, spans))
    meta[..., 2:] = torch.randint(1, 17, (heads, spans, 2))
    size = places * longest
    span, offset = torch.zeros(2, heads, size, dtype=torch.long)
    fill = torch.zeros(heads, size, dtype=torch.bool)
    for head in range(heads - 1):
        ids = torch.randperm(spans)[: places if head == 0 else places // 3]
        came[head, ids] = True
        lengths = meta[head, ids, 1]
        at = torch.randperm(size)[: int(lengths.sum())]
        fill[head, at] = True
        span[head, at] = ids.repeat_interleave(lengths)
        offset[head, at] = torch.cat([torch.arange(n) for n in lengths.tolist()])
    # token-major, as slots are
    cells = torch.randn(2, size, heads, dim).bfloat16().transpose(1, 2)
    return Drawn(came, meta, torch.randn(2, heads, places, longest, dim).bfloat16(), span, offset, fill, cells)
