"""Keys seen from nearer than they are: what lies farther from the step's token than some distance is turned, for the
attention alone, to lie just there. What is stored stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from kvlens.memory.hot import Slots


class Turn(Protocol):
    """A model's rotary embedding on keys [m, D] at positions [m], or, `back`, the keys without it. float32."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor: ...


class Distance:
    """most: tokens between the step's own and the farthest that is seen where it is."""

    def __init__(self, most: int, turn: Turn) -> None:
        self.most, self._turn = most, turn

    def seen(self, slots: Slots, layer: int, position: int, until: int) -> Slots:
        """One layer's slots as the token at `position` sees them: keys of the slots below `until` are copies, the
        others as they are."""
        true = slots.position.clamp(min=0).long()
        near = true.clamp(min=position - self.most)
        near[:, until:] = true[:, until:]
        plain = self._turn(slots.keys.flatten(0, 1), true.flatten(), layer, back=True)
        turned = self._turn(plain, near.flatten(), layer).view_as(slots.keys).to(slots.keys.dtype)
        return replace(slots, keys=torch.where((near == true)[..., None], slots.keys, turned))
