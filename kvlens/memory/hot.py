"""The hot tier: a pool of slots per layer and KV head, in zones of fixed size, with a table that says what each slot
holds.

Everything a decode step attends lies in these slots, exact tokens, coarse entries and reconstructed tokens alike, so
that one softmax over them is the method's attention. Layers that are laid out alike share one set of tensors. Shapes: l
layers of a pool, H_kv KV heads, C slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvlens.memory.layout import Layout, Zones
from kvlens.rows import ROLES
from kvlens.shape import KVShape

ROLE = {name: code for code, name in enumerate(ROLES)}
FREE = len(ROLES)
"""Role code of a slot that holds nothing (or a copy that has not landed)."""


@dataclass(frozen=True)
class Slots:
    """One layer's slots: keys, values [H_kv, C, D]; position, span int32 and role uint8 [H_kv, C]. Views, not
    copies."""

    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    span: torch.Tensor
    role: torch.Tensor

    def before(self, end: int) -> Slots:
        """The slots below `end`."""
        return Slots(
            self.keys[:, :end], self.values[:, :end], self.position[:, :end], self.span[:, :end], self.role[:, :end]
        )

    def after(self, start: int) -> Slots:
        """The slots from `start` on."""
        return Slots(
            self.keys[:, start:],
            self.values[:, start:],
            self.position[:, start:],
            self.span[:, start:],
            self.role[:, start:],
        )


class Pool:
    """Owns the slots of consecutive layers with equal zones: keys, values [l, H_kv, C, D] and the tables [l, H_kv,
    C]."""

    def __init__(
        self,
        layers: range,
        zones: Zones,
        dense: bool,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
        token_major: bool,
    ) -> None:
        self.layers, self.zones, self.dense = layers, zones, dense
        size = (len(layers), shape.kv_heads, zones.slots)
        if token_major:
            stored = (len(layers), zones.slots, shape.kv_heads, shape.head_dim)
            self.keys = torch.zeros(stored, dtype=dtype, device=device).transpose(1, 2)
            self.values = torch.zeros(stored, dtype=dtype, device=device).transpose(1, 2)
        else:
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
            "held": zones.slots - zones.held,
        }
        self.used = {"kept": 0, "coarse": 0}
        self.window_origin = 0
        self.gaps = False
        """slots of the window have been given up: the live ones are no longer the first ones"""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values, self.position, self.span, self.role

    def append(
        self,
        zone: str,
        keys: Iterable[torch.Tensor],
        values: Iterable[torch.Tensor],
        position: torch.Tensor,
        span: torch.Tensor,
        role: torch.Tensor,
    ) -> None:
        """Write m entries into the next free slots of 'kept' or 'coarse', for all the pool's layers and KV heads.

        keys, values: of each layer [H_kv, m, D], taken one after the other; position, span, role [m], or [l, H_kv, m]
        where KV heads hold different tokens.
        """
        m = position.shape[-1]
        first = self.start[zone] + self.used[zone]
        assert self.used[zone] + m <= getattr(self.zones, zone), f"zone {zone} is full"
        at = slice(first, first + m)
        for of_layer, given in ((self.keys, keys), (self.values, values)):
            for slots, entries in zip(of_layer, given, strict=True):
                slots[:, at] = entries
        self.position[:, :, at] = position.to(torch.int32)
        self.span[:, :, at] = span.to(torch.int32)
        self.role[:, :, at] = role.to(torch.uint8)
        self.used[zone] += m

    def window_slot(self, position: int) -> int:
        """Slot of the ring in which the token at `position` lies."""
        return self.start["window"] + (position - self.window_origin) % self.zones.window

    def window_slots(self, start: int, end: int) -> torch.Tensor:
        """Slots of positions [start, end)."""
        return torch.tensor([self.window_slot(p) for p in range(start, end)], dtype=torch.long, device=self.role.device)

    def take_window(self, start: int, end: int, span: int) -> torch.Tensor:
        """Name the slots of positions [start, end) as window tokens of `span`; returns the slots."""
        slots = self.window_slots(start, end)
        self.position[:, :, slots] = torch.arange(start, end, dtype=torch.int32, device=slots.device)
        self.span[:, :, slots] = span
        self.role[:, :, slots] = ROLE["window"]
        return slots

    def live_prefix(self, position: int) -> int | None:
        """Number of live slots when everything up to `position` is written, if they are exactly the first ones, else
        None."""
        zones = self.zones
        if zones.coarse or zones.recall or self.used["kept"] != zones.kept or self.gaps:
            return None
        return zones.kept + min(zones.window, position - self.window_origin + 1)


class HotTier:
    """Owns the pools, in the order of their layers."""

    def __init__(self, shape: KVShape, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.pools = [
            Pool(layers, zones, dense, shape, dtype, device, layout.token_major)
            for layers, zones, dense in layout.groups(shape.layers)
        ]
        self._of = [(pool, layer - pool.layers.start) for pool in self.pools for layer in pool.layers]
        for pool in self.pools:
            pool.window_origin = layout.window_from

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for pool in self.pools for tensor in pool.tensors())

    def pool(self, layer: int) -> Pool:
        return self._of[layer][0]

    def slots(self, layer: int) -> Slots:
        """Views of one layer's slots."""
        pool, at = self._of[layer]
        return Slots(*(tensor[at] for tensor in pool.tensors()))

    def read_window(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys, values [L, H_kv, end - start, D] of window positions."""
        parts = [(pool, pool.window_slots(start, end)) for pool in self.pools]
        keys = [pool.keys.index_select(2, slots) for pool, slots in parts]
        values = [pool.values.index_select(2, slots) for pool, slots in parts]
        return torch.cat(keys), torch.cat(values)
