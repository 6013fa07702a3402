"""The hot tier: one pool of slots per layer and KV head, in zones of fixed size, with a table that says what each slot holds.

Everything a decode step attends lies in this pool, exact tokens, coarse entries and reconstructed tokens alike, so that one
softmax over it is the method's attention. Shapes: L layers, H_kv KV heads, C slots, D head size.
"""

from __future__ import annotations

import torch

from kvlens.layout import Zones
from kvlens.rows import ROLES
from kvlens.shape import KVShape

ROLE = {name: code for code, name in enumerate(ROLES)}
FREE = len(ROLES)
"""Role code of a slot that holds nothing (or a copy that has not landed)."""


class HotTier:
    """Owns keys, values [L, H_kv, C, D] and the slot tables position, span int32 and role uint8 [L, H_kv, C]."""

    def __init__(self, shape: KVShape, zones: Zones, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.zones = shape, zones
        size = (shape.layers, shape.kv_heads, zones.slots)
        self.keys = torch.zeros(*size, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.position = torch.full(size, -1, dtype=torch.int32, device=device)
        self.span = torch.zeros(size, dtype=torch.int32, device=device)
        self.role = torch.full(size, FREE, dtype=torch.uint8, device=device)
        self.start = {
            "kept": 0,
            "coarse": zones.kept,
            "recall": zones.kept + zones.coarse,
            "window": zones.kept + zones.coarse + zones.recall,
        }
        self.used = {"kept": 0, "coarse": 0}
        self.window_origin = 0

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values, self.position, self.span, self.role

    def append(self, zone: str, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor, span: torch.Tensor,
               role: torch.Tensor) -> None:  # fmt: skip
        """Write m entries into the next free slots of 'kept' or 'coarse', for all layers and KV heads at once.

        keys, values [L, H_kv, m, D]; position, span, role [m], or [L, H_kv, m] where KV heads hold different tokens.
        """
        m = keys.shape[2]
        first = self.start[zone] + self.used[zone]
        assert self.used[zone] + m <= getattr(self.zones, zone), f"zone {zone} is full"
        at = slice(first, first + m)
        self.keys[:, :, at], self.values[:, :, at] = keys, values
        self.position[:, :, at] = position.to(torch.int32)
        self.span[:, :, at] = span.to(torch.int32)
        self.role[:, :, at] = role.to(torch.uint8)
        self.used[zone] += m

    def window_slot(self, position: int) -> int:
        """Slot of the ring in which the token at `position` lies."""
        return self.start["window"] + (position - self.window_origin) % self.zones.window
