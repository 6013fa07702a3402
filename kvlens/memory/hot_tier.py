"""The hot tier: a pool of slots per layer and KV head, in zones of fixed size, with a table that says what each slot
holds.

Everything a decode step attends lies in these slots, exact tokens, coarse entries and reconstructed tokens alike, so
that one softmax over them is the method's attention. Layers that are laid out alike share one set of tensors; where the
KV heads of a layer have different zones, each run of equal ones has tensors of its own. Shapes: l layers and h KV heads
of a pool, H_kv KV heads of the model, C slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvlens.memory.layout import Layout, Zones
from kvlens.rows import ROLES
from kvlens.shape import KVShape


class PromptStore:
    """Owns keys, values [L, H_kv, n, D] of the n prompt tokens that prefill covers, and how many of them each layer has
    seen."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        self.tokens = tokens
        self.keys = torch.zeros(shape.layers, shape.kv_heads, tokens, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._seen = [0] * shape.layers

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A chunk of one layer: keys, values [H_kv, m, D]. Raises AssertionError past the announced number of
        tokens."""
        first, m = self._seen[layer], keys.shape[1]
        assert first + m <= self.tokens, f"layer {layer}: {first + m} prompt tokens, {self.tokens} announced"
        self.keys[layer, :, first : first + m], self.values[layer, :, first : first + m] = keys, values
        self._seen[layer] = first + m

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values [1, H_kv, seen, D] of what one layer has seen."""
        seen = self._seen[layer]
        return self.keys[layer, None, :, :seen], self.values[layer, None, :, :seen]

    def seen(self, layer: int) -> int:
        return self._seen[layer]


ROLE = {name: code for code, name in enumerate(ROLES)}
FREE = len(ROLES)
"""Role code of a slot that holds nothing (or a copy that has not landed)."""


@dataclass(frozen=True)
class Slots:
    """Slots of one layer, of all its KV heads or a part of them: keys, values [h, C, D]; position, span int32 and role
    uint8 [h, C]. Views, not copies."""

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

    def beside(self, others: Slots) -> Slots:
        """These slots and behind them others, copied."""
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return Slots(*(torch.cat(pair, 1) for pair in pairs))

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
    """Owns the slots of consecutive layers and KV heads with equal zones: keys, values [l, h, C, D] and the tables
    [l, h, C]."""

    def __init__(
        self,
        layers: range,
        heads: range,
        zones: Zones,
        dense: bool,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
        token_major: bool,
    ) -> None:
        self.layers, self.heads, self.zones, self.dense = layers, heads, zones, dense
        size = (len(layers), len(heads), zones.slots)
        if token_major:
            stored = (len(layers), zones.slots, len(heads), shape.head_dim)
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
        self.used = {"kept": 0, "coarse": 0, "window": 0}
        """slots taken so far; 'window' counts in a bag only"""
        self.window_origin = 0
        self.gaps = False
        """slots were given up or never filled: the live ones are not the first ones"""
        self.bag: torch.Tensor | None = None
        """int64 [l, h], where the window is a bag: the slot that the newest token takes; None: a ring"""
        self.weight: torch.Tensor | None = None
        """float32 [l, h, coarse slots], where the layout is weighted: added to coarse entries besides log|S|"""

    @property
    def at(self) -> tuple[slice, slice]:
        """The pool's layers and KV heads, as an index of [L, H_kv, ...]."""
        return slice(self.layers.start, self.layers.stop), slice(self.heads.start, self.heads.stop)

    def slots(self, layer: int) -> Slots:
        """Views of one layer's slots, of the pool's KV heads."""
        return Slots(*(tensor[layer - self.layers.start] for tensor in self.tensors()))

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
        """Write m entries into the next free slots of 'kept' or 'coarse', or of a bag's 'window', for all the pool's
        layers and KV heads.

        keys, values: of each layer [h, m, D], taken one after the other; position, span, role [m], or [l, h, m] where
        KV heads hold different tokens. Role FREE: an entry that this KV head does not have.
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

    def weigh(self, bias: torch.Tensor, layer: int) -> None:
        """Add a layer's log weights to the bias [h, G, C] of its coarse entries, in place."""
        if self.weight is not None:
            zone = slice(self.start["coarse"], self.start["recall"])
            bias[..., zone] += self.weight[layer - self.layers.start, :, None]

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
        if self.bag is not None:
            return zones.kept + self.used["window"]
        return zones.kept + min(zones.window, position - self.window_origin + 1)

    def take_bag(self, victims: torch.Tensor | None, position: int, span: int) -> None:
        """The token at `position` takes the places of `victims`, int64 [l, h], counted from the window's first slot;
        None: the first place that was never used. Raises AssertionError where there is none left."""
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
    """Owns the pools, in the order of their layers."""

    def __init__(self, shape: KVShape, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.pools = [
            Pool(layers, heads, zones, dense, shape, dtype, device, layout.token_major)
            for layers, heads, zones, dense in layout.groups(shape.layers, shape.kv_heads)
        ]
        self._of: list[list[Pool]] = [[] for _ in range(shape.layers)]
        for pool in self.pools:
            for layer in pool.layers:
                self._of[layer].append(pool)
            pool.window_origin = layout.window_from
            if layout.weighted:
                pool.weight = torch.zeros(len(pool.layers), len(pool.heads), pool.zones.coarse, device=device)
            if layout.bag:
                pool.bag = torch.zeros(len(pool.layers), len(pool.heads), dtype=torch.long, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        more = [tensor for pool in self.pools for tensor in (pool.bag, pool.weight) if tensor is not None]
        return (*(tensor for pool in self.pools for tensor in pool.tensors()), *more)

    def pool(self, layer: int, kv_head: int = 0) -> Pool:
        """The pool that holds a KV head of a layer."""
        return next(pool for pool in self._of[layer] if kv_head in pool.heads)

    def pools_of(self, layer: int) -> list[Pool]:
        """The pools that hold a layer's KV heads, in their order: one where all have equal zones."""
        return self._of[layer]

    def slots(self, layer: int) -> Slots:
        """Views of one layer's slots. Raises AssertionError where its KV heads have different zones."""
        assert len(self._of[layer]) == 1, f"layer {layer}'s KV heads lie in {len(self._of[layer])} pools"
        return self._of[layer][0].slots(layer)

    def read_window(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys, values [L, H_kv, end - start, D] of window positions; of a bag only the newest position."""
        shape, first = self.shape, self.pools[0].keys
        size = (shape.layers, shape.kv_heads, end - start, shape.head_dim)
        keys, values = (torch.empty(size, dtype=first.dtype, device=first.device) for _ in range(2))
        for pool in self.pools:
            if pool.bag is None:
                slots = pool.window_slots(start, end)
                keys[pool.at], values[pool.at] = pool.keys.index_select(2, slots), pool.values.index_select(2, slots)
            else:
                assert end - start == 1, "a bag holds its tokens in no order"
                newest = pool.bag[..., None, None].expand(-1, -1, 1, shape.head_dim)
                keys[pool.at], values[pool.at] = pool.keys.gather(2, newest), pool.values.gather(2, newest)
        return keys, values
