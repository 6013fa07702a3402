"""What a decode step's attention reads of the device's slots: the additive bias over them, and the slots themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvlens.kernels.choice import Backend
from kvlens.kernels.pool_attend import Live, page_of
from kvlens.kernels.slot_tables import Codes, SlotReads, slot_bias, tables_by
from kvlens.memory.counterfactual import Dropped, Held
from kvlens.memory.hot_tier import FREE, ROLE, HotTier, Slots
from kvlens.memory.layout import Layout
from kvlens.memory.packed_zone import PackedZone
from kvlens.memory.placement import Selection
from kvlens.memory.span_table import SpanTable
from kvlens.shape import KVShape


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


CODES = Codes(ROLE["coarse"], ROLE["resident"], ROLE["reconstructed"], FREE)


def slot_reads(
    slots: Slots,
    spans: SpanTable,
    selectable: torch.Tensor,
    is_hot: torch.Tensor,
    group: int,
    selection: Selection | None,
) -> SlotReads:
    """What kvlens.kernels.slot_tables makes a bias and its pages from. selectable bool [S]: spans that are attended
    where the selection says so; is_hot bool [H_kv, S]; group: query heads of a KV head."""
    fine, tokens, positions = (
        (None, None, None) if selection is None else (selection.fine, selection.tokens, selection.positions)
    )
    return SlotReads(
        slots.role,
        slots.span,
        slots.position,
        spans.log_lengths,
        spans.starts,
        selectable,
        is_hot,
        group,
        CODES,
        fine,
        tokens,
        positions,
    )


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
