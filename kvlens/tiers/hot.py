"""The hot tier: a pool of slots per layer and KV head, in zones of fixed size, with tables that name the token in each
slot.

A decode step attends these slots only: exact tokens, coarse entries and reconstructed tokens alike, so that one softmax
over them is the method's attention. Layers that are laid out alike share one set of tensors; where the KV heads of a
layer have different zones, each run of equal zones has tensors of its own. Shapes: l layers and h KV heads of a pool,
H_kv KV heads of the model, C slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout, Zones
from kvlens.tiers.slots import FREE, ROLE, SlotNames, Slots, Target


class Pool:
    """Owns the slots of consecutive layers and KV heads with equal zones: keys, values [l, h, C, D] and the tables
    [l, h, C]."""

    def __init__(
        self,
        layers: range,
        heads: range,
        zones: Zones,
        dense: bool,
        layout: Layout,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """group: query heads of a KV head."""
        self.layers, self.heads, self.zones, self.dense = layers, heads, zones, dense
        self.shares = bool(layout.shared) and not dense
        """recalled spans are in slots that other KV heads use too"""
        self.index = slice(layers.start, layers.stop), slice(heads.start, heads.stop)
        """the pool's layers and KV heads in a tensor [L, H_kv, ...]"""
        self.query_heads = slice(heads.start * group, heads.stop * group)
        size = (len(layers), len(heads), zones.slots)
        if layout.token_major:
            stored = (len(layers), zones.slots, len(heads), head_dim)
            self.keys = torch.zeros(stored, dtype=dtype, device=device).transpose(1, 2)
            self.values = torch.zeros(stored, dtype=dtype, device=device).transpose(1, 2)
        else:
            self.keys = torch.zeros(*size, head_dim, dtype=dtype, device=device)
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
        self.used = {"kept": 0, "coarse": 0, "window": 0}
        """slots taken so far; 'window' counts in a bag only"""
        self.window_origin = layout.window_from
        self.gaps = False
        """slots were given up or never filled: the live ones are not the first ones"""
        self.bag: torch.Tensor | None = None
        """int64 [l, h], where the window is a bag: the slot that the newest token takes; None: a ring"""
        if layout.bag:
            self.bag = torch.zeros(size[:2], dtype=torch.long, device=device)
        self.weight: torch.Tensor | None = None
        """float32 [l, h, coarse slots], where the layout is weighted: added to coarse entries besides log|S|"""
        if layout.weighted:
            self.weight = torch.zeros(*size[:2], zones.coarse, device=device)

    def slots(self, layer: int, end: int | None = None) -> Slots:
        """Return views of one layer's slots, of the pool's KV heads: those below `end`, None: all."""
        row = layer - self.layers.start
        return Slots(*(tensor[row, :, :end] for tensor in self.tensors()))

    def target(self, layer: int) -> Target:
        """Return a layer's slots as units go to them."""
        row = layer - self.layers.start
        return Target(self.keys[row], self.values[row], self.heads.start)

    def held(self, layer: int) -> Slots:
        """Return views of one layer's slots in the held zone."""
        return self.slots(layer).between(self.start["held"], None)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return keys, values, position, span and role, as Slots has them."""
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
        """Write m entries into the next free slots of 'kept' or 'coarse', or of a bag's 'window', for all the pool's
        layers and KV heads. Raises AssertionError where the zone is full.

        keys, values: of each layer [h, m, D], taken one after the other; position, span, role [m], or [l, h, m] where
        KV heads hold different tokens. Role FREE: an entry that this KV head does not have.
        """
        m = position.shape[-1]
        start = self.start[zone] + self.used[zone]
        assert self.used[zone] + m <= getattr(self.zones, zone), f"zone {zone} is full"
        place = slice(start, start + m)
        for layers, entries in ((self.keys, keys), (self.values, values)):
            for slots, of_layer in zip(layers, entries, strict=True):
                slots[:, place] = of_layer
        self.position[:, :, place] = position.to(torch.int32)
        self.span[:, :, place] = span.to(torch.int32)
        self.role[:, :, place] = role.to(torch.uint8)
        self.used[zone] += m

    def name(self, layer: int, names: SlotNames) -> None:
        """Name slots of a layer that have been filled."""
        row, device = layer - self.layers.start, self.role.device
        places = (names.kv_heads - self.heads.start) * self.role.shape[2] + names.slots
        where = torch.from_numpy(places).to(device)
        for table, values in ((self.position, names.position), (self.span, names.span), (self.role, names.role)):
            table[row].view(-1).index_copy_(0, where, torch.from_numpy(values).to(device))

    def write(self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's token at `position` into its slot: keys, values [H_kv, D]."""
        row, heads = layer - self.layers.start, self.index[1]
        if self.bag is None:
            slot = self.window_slot(position)
            self.keys[row, :, slot], self.values[row, :, slot] = keys[heads], values[heads]
        else:
            newest = self.bag[row, :, None, None].expand(-1, 1, keys.shape[-1])
            self.keys[row].scatter_(1, newest, keys[heads, None])
            self.values[row].scatter_(1, newest, values[heads, None])

    def window_slot(self, position: int) -> int:
        """Return the slot of the ring that holds the token at `position`."""
        return self.start["window"] + (position - self.window_origin) % self.zones.window

    def window_slots(self, start: int, end: int) -> torch.Tensor:
        """Return the slots of positions [start, end), int64."""
        positions = torch.arange(start, end, device=self.role.device)
        return self.start["window"] + (positions - self.window_origin) % self.zones.window

    def take_window(self, start: int, end: int, span: int) -> torch.Tensor:
        """Name the slots of positions [start, end) as window tokens of `span`; return the slots."""
        slots = self.window_slots(start, end)
        self.position[:, :, slots] = torch.arange(start, end, dtype=torch.int32, device=slots.device)
        self.span[:, :, slots] = span
        self.role[:, :, slots] = ROLE["window"]
        return slots

    def live_prefix(self, position: int) -> int | None:
        """Return the number of live slots when everything up to `position` is written, if they are exactly the first
        ones, else None."""
        zones = self.zones
        if zones.coarse or zones.recall or self.shares or self.used["kept"] != zones.kept or self.gaps:
            return None
        if self.bag is not None:
            return zones.kept + self.used["window"]
        return zones.kept + min(zones.window, position - self.window_origin + 1)

    def live_slots(self, layer: int, position: int) -> Slots | None:
        """Return views of a layer's live slots when everything up to `position` is written, if they are exactly the
        first ones, else None."""
        live = self.live_prefix(position)
        return None if live is None else self.slots(layer, live)

    def take_bag(self, victims: torch.Tensor | None, position: int, span: int) -> None:
        """Give the token at `position` the places of `victims`, int64 [l, h], counted from the window's first slot;
        None: the first place that was never used. Raises AssertionError where no place is left."""
        assert self.bag is not None
        if victims is None:
            assert self.used["window"] < self.zones.window, "the bag is full and nothing was evicted"
            self.bag.fill_(self.start["window"] + self.used["window"])
            self.used["window"] += 1
        else:
            self.bag.copy_(victims + self.start["window"])
        for table, value in ((self.position, position), (self.span, span), (self.role, ROLE["window"])):
            table.scatter_(2, self.bag[..., None], value)


class HotTier:
    """Owns the pools, in the order of their layers, and which positions the windows hold."""

    def __init__(self, shape: KVShape, layout: Layout, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """tokens: of the prompt, without the token that step 0 feeds."""
        self.shape = shape
        self.example = torch.empty(0, shape.head_dim, dtype=dtype, device=device)
        """no key, in the form and place of all keys"""
        self.pools = [
            Pool(*run, layout, shape.group, shape.head_dim, dtype, device)
            for run in layout.groups(shape.layers, shape.kv_heads)
        ]
        self.parts = [[pool for pool in self.pools if layer in pool.layers] for layer in range(shape.layers)]
        """of each layer the pools that hold its KV heads, in their order: one where all have equal zones"""
        self.oldest = layout.window_from
        """position of the oldest token in the window (of a window that evicts by itself: where it began)"""
        self.newest = tokens - 1
        """position of the newest token that has a slot"""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors of the pools."""
        more = [tensor for pool in self.pools for tensor in (pool.bag, pool.weight) if tensor is not None]
        return (*(tensor for pool in self.pools for tensor in pool.tensors()), *more)

    def pool(self, layer: int, kv_head: int = 0) -> Pool:
        """Return the pool that holds a KV head of a layer."""
        return next(pool for pool in self.parts[layer] if kv_head in pool.heads)

    def slots(self, layer: int) -> Slots:
        """Return views of one layer's slots. Raises AssertionError where its KV heads have different zones."""
        assert len(self.parts[layer]) == 1, f"layer {layer}'s KV heads are in {len(self.parts[layer])} pools"
        return self.parts[layer][0].slots(layer)

    def read_window(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys, values [L, H_kv, end - start, D] of window positions; of a bag only the newest
        position."""
        shape = self.shape
        size = (shape.layers, shape.kv_heads, end - start, shape.head_dim)
        keys, values = (self.example.new_empty(size) for _ in range(2))
        for pool in self.pools:
            if pool.bag is None:
                slots = pool.window_slots(start, end)
                keys[pool.index], values[pool.index] = pool.keys[:, :, slots], pool.values[:, :, slots]
            else:
                assert end - start == 1, "a bag holds its tokens in no order"
                newest = pool.bag[..., None, None].expand(-1, -1, 1, shape.head_dim)
                keys[pool.index], values[pool.index] = pool.keys.gather(2, newest), pool.values.gather(2, newest)
        return keys, values
