"""What SeKV's query heads read of a layer's spans at a step (sec. 3.3), and which KV heads have nothing to choose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kvlens.kernels.best_rows import best_rows
from kvlens.memory.placement import Gate, Selection, index_read
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.routing import Routing
from kvlens.shape import KVShape


class WholeHeads:
    """KV heads that keep every token. mask bool [L, H_kv]."""

    def __init__(self, heads: Iterable[tuple[int, int]], shape: KVShape, device: torch.device) -> None:
        """heads: (layer, KV head)."""
        self.mask = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.bool, device=device)
        for layer, head in heads:
            self.mask[layer, head] = True
        counts = self.mask.sum(1).tolist()
        self.some = frozenset(layer for layer, count in enumerate(counts) if 0 < count < shape.kv_heads)
        """layers in which some KV heads are whole, and others not"""
        self.all = frozenset(layer for layer, count in enumerate(counts) if count == shape.kv_heads)


def selection(
    params: SeKVParameters,
    shape: KVShape,
    routing: Routing,
    capacity: int,
    whole: WholeHeads,
    layer: int,
    q: torch.Tensor,
    records: bool = True,
) -> Selection | None:
    """Of queries q [Hq, D]; capacity: span ids; records: what is for the log alone is computed. None: there is nothing
    to choose."""
    if params.zoom == "off" or len(routing.span) == 0 or layer in whole.all:
        return None
    alive = routing.span > 0
    if layer in whole.some:
        alive = alive & ~whole.mask[layer, :, None]
    score = routing.score(layer, q[:, None])
    z = routing.expanded(layer, score)[:, 0].unflatten(0, (shape.kv_heads, -1))
    best = routing.pooled(score[:, 0].unflatten(0, (shape.kv_heads, -1)), z)
    empty = torch.zeros(*z.shape[:2], capacity, dtype=torch.bool, device=q.device)
    index = routing.span.expand_as(z)
    priority = best.masked_fill(~(z.any(1) & alive), float("-inf"))
    order = best_rows(priority, priority.shape[1])
    wishes = routing.span[order.clamp(min=0)].masked_fill(order < 0, -1)
    if not params.reconstruction:
        z, wishes = torch.zeros_like(z), torch.full_like(wishes, -1)
    later = torch.zeros(shape.kv_heads, dtype=torch.bool, device=q.device) if params.zoom == "next" else None
    result = Selection(
        empty.scatter(2, index, z),
        wishes,
        now=later,
        cause="zoom",
        later_cause="zoom",
        index_bytes=index_read(routing.bytes_read),
    )
    if not records:
        return result
    nan = torch.full((shape.kv_heads, capacity), float("nan"), device=q.device)
    logged = nan.scatter(1, routing.span.expand_as(best), best.masked_fill(~alive, float("nan")))
    if layer in whole.some:
        zoomable = empty[:, 0].scatter(1, routing.span.expand_as(best), alive)
    else:
        zoomable = empty[0, 0].scatter(0, routing.span, alive)
    highest = score[:, 0].unflatten(0, (shape.kv_heads, -1)).masked_fill(~alive[..., None, :], float("-inf"))
    gate = Gate(highest.amax(-1).flatten(), routing.threshold[layer])
    return replace(result, zoomable=zoomable, score=logged, gate=gate)
