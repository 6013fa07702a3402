"""Slots of a recall zone that several KV heads share: those of one layer, or those of the whole model.

A slot belongs to one KV head at a time. An attention kernel with a table of slots per KV head reads them in place; here
the attention of a layer reads a copy that lasts for this attention. Shapes: M slots, h KV heads, D head size.
"""

from __future__ import annotations

import torch

from kvlens.memory.hot_tier import FREE, Slots


class SharedSlots:
    """Owns keys, values [M, D] and their tables [M]: position, span and owner int32, role uint8. The owner of a slot is
    layer * KV heads + KV head."""

    def __init__(self, size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kv_heads = kv_heads
        self.keys = torch.zeros(size, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.position = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.span = torch.zeros(size, dtype=torch.int32, device=device)
        self.owner = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.role = torch.full((size,), FREE, dtype=torch.uint8, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors."""
        return self.keys, self.values, self.position, self.span, self.owner, self.role

    def name(self, layer: int, named: torch.Tensor) -> None:
        """Name slots that a layer's KV heads have filled: int64 [5, tokens], KV head, slot, position, span, role."""
        heads, places, position, span, role = named
        self.owner[places] = (layer * self._kv_heads + heads).to(torch.int32)
        self.position[places] = position.to(torch.int32)
        self.span[places] = span.to(torch.int32)
        self.role[places] = role.to(torch.uint8)

    def of(self, layer: int, heads: range) -> Slots:
        """Return copies of the slots of some KV heads of a layer [h, w, ...], w being the most that one of them has;
        the others are filled up with slots that hold nothing."""
        codes = layer * self._kv_heads + torch.arange(heads.start, heads.stop, device=self.owner.device)
        owned = (self.owner == codes[:, None]) & (self.role != FREE)
        width = int(owned.sum(1).max()) if owned.numel() else 0
        index = owned.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
        live = owned.gather(1, index)
        role = torch.where(live, self.role[index], FREE)
        return Slots(self.keys[index], self.values[index], self.position[index], self.span[index], role)
