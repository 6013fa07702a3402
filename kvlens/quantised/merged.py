"""Keys or values of two neighbouring layers as one: a direction that both share, and each layer's lengths. Tokens whose
directions differ most are stored exactly. Layers before the first pair, and a last one without a partner, are exact.

The direction is on the arc between the two layers' directions, `part` of the way from the lower layer's to the upper
one's. Source: Liu et al., KV Cache Compression in Depth Dimension, arXiv 2405.14366. Shapes: H_kv KV heads, R rows, C
exact tokens, D head size.
"""

from __future__ import annotations

import torch

from kvlens.quantised.form import Quantised
from kvlens.quantised.stored import Codes
from kvlens.shape import KVShape

Heads = slice | list[int]
LEAST_ANGLE = 1e-4
"""radians, below which the arc is a line"""


class MergedLayers(Codes):
    """Owns the rows of all layers, of keys or of values."""

    def __init__(
        self, shape: KVShape, form: Quantised, rows: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """rows: of each layer, equal in all."""
        self._form, self._dtype, heads, size = form, dtype, shape.kv_heads, shape.head_dim
        self._merged_from, count = form.merged_from, rows[0]
        self._pairs = (shape.layers - self._merged_from) // 2
        exact_layers = [layer for layer in range(shape.layers) if self._pair(layer) is None]
        self._exact = {layer: torch.zeros(heads, count, size, dtype=dtype, device=device) for layer in exact_layers}
        sizes, room = (self._pairs, heads), form.exact_room(count)
        self._direction = torch.zeros(*sizes, count, size, dtype=dtype, device=device)
        self._lengths = torch.zeros(*sizes, 2, count, dtype=torch.float16, device=device)
        self._places = torch.full((*sizes, room), -1, dtype=torch.int32, device=device)
        """rows that are stored exactly, -1: none"""
        self._apart = torch.zeros(*sizes, 2, room, size, dtype=dtype, device=device)
        self._least = torch.full(sizes, torch.inf, device=device)
        """the smallest angle that a token stored exactly had when the prompt was merged"""
        self._waiting: dict[int, torch.Tensor] = {}
        """states of a pair's lower layer, until those of the upper one come"""

    def _pair(self, layer: int) -> int | None:
        """Return the pair that a layer belongs to; None: it is exact."""
        pair = (layer - self._merged_from) // 2
        return pair if layer >= self._merged_from and pair < self._pairs else None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        shared = self._direction, self._lengths, self._places, self._apart, self._least
        return (*self._exact.values(), *(shared if self._pairs else ()))

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        pair = self._pair(layer)
        if pair is None:
            self._exact[layer][heads, start : start + states.shape[1]] = states
        elif (layer - self._merged_from) % 2 == 0:
            self._waiting[pair] = states.clone()
        else:
            self._merge(pair, heads, start, self._waiting.pop(pair).float(), states.float())

    def _merge(self, pair: int, heads: Heads, start: int, lower: torch.Tensor, upper: torch.Tensor) -> None:
        rows = slice(start, start + lower.shape[1])
        lengths = torch.stack([lower.norm(dim=-1), upper.norm(dim=-1)], 1)
        pairs = zip((lower, upper), lengths.unbind(1), strict=True)
        units = [states / length[..., None].clamp(min=1e-20) for states, length in pairs]
        angle = (units[0] * units[1]).sum(-1).clamp(-1, 1).arccos()
        self._direction[pair, heads, rows] = between(units[0], units[1], angle, self._form.part).to(self._dtype)
        self._lengths[pair, heads, :, rows] = lengths.clamp(max=torch.finfo(torch.float16).max).half()
        count = self._form.exact_room(lower.shape[1])
        head_list = range(len(self._places[pair]))[heads] if isinstance(heads, slice) else heads
        for row, head in enumerate(head_list):
            places = self._places[pair, head]
            used = int((places >= 0).sum())
            order = angle[row].argsort(descending=True, stable=True)
            if bool(self._least[pair, head].isinf()):
                order = order[:count]
                self._least[pair, head] = angle[row, order].min() if len(order) else torch.inf
            else:
                order = order[angle[row, order] > self._least[pair, head]]
            order = order[: len(places) - used]
            places[used : used + len(order)] = (order + start).int()
            for side, states in enumerate((lower, upper)):
                self._apart[pair, head, side, used : used + len(order)] = states[row, order].to(self._dtype)

    def get(self, layer: int, heads: Heads, until: int) -> torch.Tensor:
        pair = self._pair(layer)
        if pair is None:
            return self._exact[layer][heads, :until]
        side = (layer - self._merged_from) % 2
        lengths = self._lengths[pair, heads, side, :until].float()
        states = (self._direction[pair, heads, :until].float() * lengths[..., None]).to(self._dtype)
        places = self._places[pair][heads].long()
        for row, exact in enumerate(self._apart[pair][heads][:, side]):
            is_stored = (places[row] >= 0) & (places[row] < until)
            states[row, places[row, is_stored]] = exact[is_stored]
        return states


def between(lower: torch.Tensor, upper: torch.Tensor, angle: torch.Tensor, part: float) -> torch.Tensor:
    """Return unit vectors on the arc from `lower` to `upper`, `part` of the way: unit vectors [..., D], angle [...] in
    radians."""
    sine = angle.sin()
    bent = (sine.abs() > LEAST_ANGLE)[..., None]
    arc = ((1 - part) * angle).sin()[..., None] * lower + (part * angle).sin()[..., None] * upper
    line = (1 - part) * lower + part * upper
    mixed = torch.where(bent, arc / sine[..., None].clamp(min=LEAST_ANGLE), line)
    return mixed / mixed.norm(dim=-1, keepdim=True).clamp(min=1e-20)
