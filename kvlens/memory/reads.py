"""What a decode step's attention reads of the device's slots: the additive bias over them, and the slots themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch

from kvlens.kernels.attend import runs_on
from kvlens.kernels.choice import Backend
from kvlens.kernels.pool_attend import Live, page_of
from kvlens.kernels.slot_tables import Codes, SlotReads, slot_bias, tables_by
from kvlens.memory.counterfactual import Counterfactual
from kvlens.memory.log import MemoryLog
from kvlens.memory.packed import PackedKept, PackedZone
from kvlens.memory.placement import Selection
from kvlens.tiers.hot import HotTier, Pool
from kvlens.tiers.layout import Layout
from kvlens.tiers.slots import EXACT, FREE, ROLE, SharedSlots, Slots, SpanTable

CODES = Codes(ROLE["coarse"], ROLE["resident"], ROLE["reconstructed"], FREE)


class Turn(Protocol):
    """A model's rotary embedding on keys [m, D] at positions [m], or, `back`, the keys without it. float32."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor: ...


class Distance:
    """Moves keys nearer for the attention alone; stored keys do not change. Keys farther from the step's token than
    Layout.farthest are seen at that distance, or the gaps between a KV head's tokens are closed (Layout.closed)."""

    def __init__(self, layout: Layout, turn: Turn) -> None:
        self._layout, self._turn = layout, turn

    def rotate_slots(self, slots: Slots, layer: int, position: int, until: int) -> Slots:
        """Return one layer's slots as the token at `position` sees them: keys of the slots below `until` are copies,
        the others as they are."""
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
        """Return positions int64 [h, C] as if the tokens of each KV head in the slots below `until` were side by side,
        with the last one at its true position."""
        free = (slots.role == FREE) | (torch.arange(true.shape[1], device=true.device) >= until)
        last = true.masked_fill(free, -1).amax(1, keepdim=True)
        order = true.masked_fill(free, torch.iinfo(torch.long).max).argsort(1)
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(true.shape[1], device=true.device).expand_as(order)
        )
        return torch.where(free, true, last - (~free).sum(1, keepdim=True) + 1 + rank)


def slot_reads(
    slots: Slots, spans: SpanTable, is_hot: torch.Tensor, group: int, selection: Selection | None
) -> SlotReads:
    """Return the tables from which kvlens.kernels.slot_tables makes a bias and its pages. is_hot bool [h, S] of the
    slots' KV heads; group: query heads of a KV head."""
    selection_parts = (
        (None, None, None) if selection is None else (selection.fine, selection.tokens, selection.positions)
    )
    tables = slots.role, slots.span, slots.position, spans.log_lengths, spans.starts, spans.selectable, is_hot
    return SlotReads(*tables, group, CODES, *selection_parts)


def unheld_share(slots: Slots, held: int, members: torch.Tensor, entries: int) -> torch.Tensor:
    """Return the share of the tokens of each coarse entry that is not held, float32 [h, entries], 0 where an entry has
    no tokens. held: slots at the end, those of the held zone; members int64 [h, P]: the entry of each position."""
    position, is_live = slots.position[:, -held:].long(), slots.role[:, -held:] != FREE
    of_held = members.gather(1, position.clamp(min=0)).where(is_live, -1)

    def count(of_tokens: torch.Tensor) -> torch.Tensor:
        index = of_tokens.where(of_tokens >= 0, entries)
        ones = torch.ones_like(index, dtype=torch.float32)
        return ones.new_zeros(len(index), entries + 1).scatter_add_(1, index, ones)[:, :-1]

    tokens = count(members)
    return (tokens - count(of_held)) / tokens.clamp(min=1)


class Reads:
    """Reads the tables that the memory writes and owns; holds nothing of its own. packed None: no tokens are packed;
    distance None: keys are seen where they are; counterfactual None: nothing is held or dropped."""

    def __init__(
        self,
        layout: Layout,
        hot: HotTier,
        shared: Sequence[SharedSlots],
        spans: SpanTable,
        packed: PackedZone | PackedKept | None,
        distance: Distance | None,
        counterfactual: Counterfactual | None,
        log: MemoryLog,
    ) -> None:
        self._layout, self.hot, self._shared, self.spans, self._packed = layout, hot, shared, spans, packed
        self._distance, self._counterfactual, self.log = distance, counterfactual, log
        self._group = hot.shape.group

    @cached_property
    def by(self) -> Backend:
        """What makes the biases: looked up for the first layer that has one."""
        return runs_on(self.hot.example, biased=True)

    def part(
        self, layer: int, selection: Selection | None, part: int = 0
    ) -> tuple[Slots, torch.Tensor | None, Live | None]:
        """Return the slots that a step's attention in a part of the layer goes through, and their bias and pages, see
        `bias`."""
        self.log.attended = layer
        if selection is None and self._packed is None and self._distance is None and self._counterfactual is None:
            slots = self.hot.parts[layer][part].live_slots(layer, self.hot.newest)
            if slots is not None:
                return slots, None, None
        whole = self._made(self.hot.parts[layer][part], layer)
        bias, live = self.bias(layer, selection, part, whole)
        return self.slots(layer, bias, part) if whole is None else whole, bias, live

    def bias(
        self, layer: int, selection: Selection | None, part: int = 0, whole: Slots | None = None
    ) -> tuple[torch.Tensor | None, Live | None]:
        """Return the additive bias [h, G, C] over the slots of a part of the layer (log|S| on coarse entries, -inf on
        slots that a query head does not attend), and the pages that k1 reads with it.

        No bias where every slot written so far is attended as it is (then the live slots are a prefix of the pool).
        KV heads that are whole by the layout attend everything but dropped tokens, whatever the selection says. The
        bias leaves the held zone out where nothing is held at this step. No pages: PyTorch attends, or k1 has to find
        them in the bias. whole: the copies of packed tokens or shared slots, where there are some already.
        """
        pool, changes = self.hot.parts[layer][part], self._counterfactual
        held, drops = (False, False) if changes is None else (changes.holds(layer), changes.drops(layer))
        if (layer, pool.heads.start) in self._layout.whole:
            selection = None
        if self._packed is not None:
            plain = not self._packed.is_ragged
        else:
            plain = pool.live_prefix(self.hot.newest) is not None
        if selection is None and not held and not drops and plain:
            return None, None
        heads = pool.index[1]
        slots = whole or self._made(pool, layer) or pool.slots(layer, None if held else pool.start["held"])
        if selection is not None and len(pool.heads) < self.hot.shape.kv_heads:
            selection = selection.take_heads(heads)
        reads = slot_reads(slots, self.spans, self.spans.is_hot[layer, heads], self._group, selection)
        live: Live | None = None
        if self.by == "torch":
            bias = slot_bias(reads)
        else:
            live = tables_by(self.by, reads, page_of(slots.role.shape[1]))
            assert live.bias is not None, "slot tables carry the bias they are made from"
            bias = live.bias
        if selection is not None and selection.entries is not None:
            entries = slice(pool.start["coarse"], pool.start["coarse"] + selection.entries.shape[-1])
            logs = self.spans.log_lengths[slots.span[:, None, entries].long()]
            is_read = selection.entries & (slots.role != FREE)[:, None, entries]
            bias[..., entries] = torch.where(is_read, logs, float("-inf"))
            live = None  # its pages were those of the bias before
        if selection is not None and selection.correct is not None:
            bias += selection.correct(slots.keys, slots.position, heads)
        if pool.weight is not None:
            bias[..., pool.start["coarse"] : pool.start["recall"]] += pool.weight[layer - pool.layers.start, :, None]
        if changes is not None and held:
            kept_entries = None
            if selection is not None and selection.entries is not None and selection.members is not None:
                share = unheld_share(slots, pool.zones.held, selection.members, selection.entries.shape[-1])
                kept_entries = bias[..., entries] + share.log()[:, None]
            bias, live = changes.show(layer, heads, slots, bias), None
            if kept_entries is not None:
                bias[..., entries] = kept_entries
        if changes is not None and drops:
            bias, live = changes.hide(layer, heads, slots, self.spans, bias), None
        return bias, live

    def slots(self, layer: int, bias: torch.Tensor | None, part: int = 0) -> Slots:
        """Return the slots of a part that a step's attention with this bias goes through."""
        pool = self.hot.parts[layer][part]
        if copied := self._made(pool, layer):
            return copied
        live = pool.live_prefix(self.hot.newest) if bias is None else bias.shape[-1]
        slots = pool.slots(layer, live)
        if self._distance is None or pool.dense:
            return slots
        return self._distance.rotate_slots(slots, layer, self.hot.newest, pool.start["held"])

    def _made(self, pool: Pool, layer: int) -> Slots | None:
        """Return a layer's slots as they are made for an attention, the held zone behind them where it is attended:
        packed tokens restored, or copies with the shared zone. None: the pool's own slots are attended."""
        held = self._counterfactual is not None and self._counterfactual.holds(layer)
        if self._packed is not None:
            return self._packed.slots(pool, layer, self.hot.newest, held)
        if not pool.shares:
            return None
        slots = pool.slots(layer, pool.start["held"])
        whole = slots.beside(self._shared[self._layout.shared_zone(layer)].copy_slots(layer, pool.heads))
        return whole.beside(pool.held(layer)) if held else whole

    def copies(self, layer: int, part: int = 0) -> bool:
        """Return whether what a part's attention goes through is made for it: packed tokens, shared slots, keys that
        are seen from elsewhere."""
        pool = self.hot.parts[layer][part]
        return self._packed is not None or pool.shares or (self._distance is not None and not pool.dense)

    def together(self, layers: range, bias: torch.Tensor | None, part: int = 0) -> Slots:
        """Return what `slots` returns, of some layers of one pool with equally wide biases [l, h, C, ...]: views.
        Raises AssertionError where they would be copies."""
        assert not self.copies(layers.start, part)
        pool = self.hot.parts[layers.start][part]
        live = self.slots(layers.start, bias, part).role.shape[1]
        rows = slice(layers.start - pool.layers.start, layers.stop - pool.layers.start)
        return Slots(*(tensor[rows, :, :live] for tensor in pool.tensors()))

    def in_order(self, positions: int) -> bool:
        """Return whether every token of a run of so many positions stays exactly in the slot of its position, alike in
        all KV heads."""
        pool = self.hot.pools[0]
        if len(self.hot.pools) > 1 or pool.dense or pool.bag is not None or self._layout.shared:
            return False
        if self._packed is not None or self._distance is not None or self._counterfactual is not None:
            return False
        zones, n = pool.zones, self.hot.newest + 1
        if zones.coarse or zones.recall or pool.gaps or pool.used["kept"] != zones.kept or zones.slots < positions:
            return False
        tables = pool.position[:, :, :n], pool.role[:, :, :n], pool.span[:, :, :n]
        ordered = bool((tables[0] == torch.arange(n, device=tables[0].device)).all())
        exact = torch.isin(tables[1], torch.tensor(EXACT, dtype=torch.uint8, device=tables[1].device))
        return ordered and bool(exact.all()) and all(bool((table == table[:1, :1]).all()) for table in tables)
