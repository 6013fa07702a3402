"""What a decode step's attention reads of the device's slots: the additive bias over them, and the slots themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.choice import Backend
from kvlens.kernels.pool_attend import Live, page_of
from kvlens.kernels.slot_tables import slot_bias, tables_by
from kvlens.memory.bias import slot_reads
from kvlens.memory.counterfactual import Held
from kvlens.memory.distance import Distance
from kvlens.memory.dropped import Dropped
from kvlens.memory.hot_tier import HotTier, Slots
from kvlens.memory.layout import Layout
from kvlens.memory.packed_zone import PackedZone
from kvlens.memory.placement import Selection
from kvlens.memory.span_table import SpanTable
from kvlens.shape import KVShape


@dataclass(frozen=True)
class Attended:
    """Reads the tables that Memory writes and owns; holds nothing of its own. `position`: of the step's input token."""

    shape: KVShape
    layout: Layout
    hot: HotTier
    spans: SpanTable
    selectable: torch.Tensor
    """[spans]: of these a selection chooses"""
    is_hot: torch.Tensor
    """[L, H_kv, spans]: the span's tokens lie in slots"""
    packed: PackedZone | None
    distance: Distance | None
    held: Held
    dropped: Dropped

    def bias(
        self, layer: int, selection: Selection | None, by: Backend, position: int, part: int = 0
    ) -> tuple[torch.Tensor | None, Live | None]:
        """Additive bias [h, G, C] over the slots of a part of the layer (log|S| on coarse entries, -inf on what a query
        head does not attend), and what k1 reads with it. by: what makes them.

        No bias when every slot written so far is attended as it is (then the live slots are a prefix of the pool), as
        in KV heads that are whole by the layout: they attend everything, whatever the selection says, but for what is
        dropped. Without the held zone's slots where nothing is held at this step. No pages: PyTorch attends, or k1 has
        to find them in the bias.
        """
        held, drops, pool = self.held.live(layer), self.dropped.live(layer), self.hot.pools_of(layer)[part]
        selection = None if (layer, pool.heads.start) in self.layout.whole else selection
        plain = self.packed is not None or pool.live_prefix(position) is not None
        if selection is None and not held and not drops and plain:
            return None, None
        slots, heads = pool.slots(layer), pool.at[1]
        if self.packed is not None:
            slots = self.packed.slots(pool, layer, position, held)
        elif not held:
            slots = slots.before(pool.start["held"])
        own = selection if selection is None or len(pool.heads) == self.shape.kv_heads else selection.of(heads)
        reads = slot_reads(slots, self.spans, self.selectable, self.is_hot[layer, heads], self.shape.group, own)
        if by == "torch":
            bias, live = slot_bias(reads), None
        else:
            live = tables_by(by, reads, page_of(slots.role.shape[1]))
            assert live.bias is not None, "slot tables carry the bias they are made from"
            bias = live.bias
        pool.weigh(bias, layer)
        if held:
            bias, live = self.held.show(layer, heads, slots, bias), None
        if drops:
            bias, live = self.dropped.hide(layer, heads, slots, self.spans, bias), None
        return bias, live

    def slots(self, layer: int, bias: torch.Tensor | None, position: int, part: int = 0) -> Slots:
        """The slots of a part that a step's attention with this bias goes through."""
        pool = self.hot.pools_of(layer)[part]
        if self.packed is not None:
            return self.packed.slots(pool, layer, position, self.held.live(layer))
        live = pool.live_prefix(position) if bias is None else bias.shape[-1]
        slots = pool.slots(layer).before(pool.zones.slots if live is None else live)
        if self.distance is None or pool.dense:
            return slots
        return self.distance.seen(slots, layer, position, pool.start["held"])

    def together(self, layers: range, bias: torch.Tensor | None, position: int, part: int = 0) -> Slots:
        """As `slots`, of some layers of one pool with equally wide biases [l, h, C, ...]: views, but for packed tokens
        and keys that are seen from elsewhere."""
        if self.packed is not None or self.distance is not None:
            each = [vars(self.slots(layer, bias, position, part)).values() for layer in layers]
            return Slots(*(torch.stack(tensors) for tensors in zip(*each, strict=True)))
        pool = self.hot.pools_of(layers.start)[part]
        live = self.slots(layers.start, bias, position, part).role.shape[1]
        at = slice(layers.start - pool.layers.start, layers.stop - pool.layers.start)
        return Slots(*(tensor[at, :, :live] for tensor in pool.tensors()))
