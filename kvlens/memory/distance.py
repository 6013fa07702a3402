"""Keys seen from nearer than they are, for the attention alone: what lies farther from the step's token than some
distance as if it lay just there (Layout.farthest), or all tokens as if those that are gone had never been between them
(Layout.closed). What is stored stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from kvlens.memory.hot_tier import FREE, Slots
from kvlens.memory.layout import Layout


class Turn(Protocol):
    """A model's rotary embedding on keys [m, D] at positions [m], or, `back`, the keys without it. float32."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor: ...


class Distance:
    """Where the keys of a layout are seen."""

    def __init__(self, layout: Layout, turn: Turn) -> None:
        self._layout, self._turn = layout, turn

    def seen(self, slots: Slots, layer: int, position: int, until: int) -> Slots:
        """One layer's slots as the token at `position` sees them: keys of the slots below `until` are copies, the
        others as they are."""
        true = slots.position.clamp(min=0).long()
        near = (
            self._closed(slots, true, until)
            if self._layout.closed
            else true.clamp(min=position - self._layout.farthest)
        )
        near[:, until:] = true[:, until:]
        plain = self._turn(slots.keys.flatten(0, 1), true.flatten(), layer, back=True)
        turned = self._turn(plain, near.flatten(), layer).view_as(slots.keys).to(slots.keys.dtype)
        return replace(slots, keys=torch.where((near == true)[..., None], slots.keys, turned))

    def _closed(self, slots: Slots, true: torch.Tensor, until: int) -> torch.Tensor:
        """Positions int64 [h, C] as if the tokens of each KV head in the slots below `until` ended where they end, and
        lay side by side."""
        free = (slots.role == FREE) | (torch.arange(true.shape[1], device=true.device) >= until)
        last = true.masked_fill(free, -1).amax(1, keepdim=True)
        order = true.masked_fill(free, torch.iinfo(torch.long).max).argsort(1)
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(true.shape[1], device=true.device).expand_as(order)
        )
        return torch.where(free, true, last - (~free).sum(1, keepdim=True) + 1 + rank)
