"""The held zone of the slot pool: token ranges kept exactly for chosen (layer, KV head), whatever the method does with
them.

The zone lies behind all others. It takes part in a layer's attention from the first step at which something in it is
held and written; until then the layer attends the very slots it would attend without a hold.
Shapes: H_kv KV heads, m held slots of a layer, P positions of the run, C slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvlens.memory.holds import Drop, Hold
from kvlens.memory.hot_tier import FREE, ROLE, HotTier, PromptStore, Slots
from kvlens.memory.layout import Layout, Zones
from kvlens.memory.placement import Selection
from kvlens.memory.span_table import WINDOW, SpanTable
from kvlens.shape import KVShape

NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class _Zone:
    """One layer's held slots."""

    since: torch.Tensor
    """int32 [H_kv, m]: first step at which the slot's token is held; NEVER: the slot is not used"""
    position: torch.Tensor
    """int64 [H_kv, m], P where the slot is not used"""
    covers: torch.Tensor
    """bool [H_kv, P + 1]: positions that are attended here, and nowhere else, at this step"""
    heads_at: dict[int, list[tuple[int, int]]]
    """position -> (KV head, place in the zone) of the slots that keep it"""
    begins: int
    """first step at which any slot is attended"""


class Held:
    """Owns what is held: which slot keeps which position for which KV head, and from when on. Empty for a run without
    holds."""

    def __init__(
        self, holds: Sequence[Hold], kv_heads: int, prompt_tokens: int, positions: int, device: torch.device
    ) -> None:
        """prompt_tokens: positions below it are written when prefill ends, later ones one per step; positions: of the
        whole run."""
        self.prompt_tokens, self.step, self.kv_heads = prompt_tokens, -1, kv_heads
        self.positions = positions
        since: dict[int, dict[int, dict[int, int]]] = {}
        for hold in holds:
            for layer, head in hold.heads:
                kept = since.setdefault(layer, {}).setdefault(head, {})
                for position in range(hold.tok_start, min(hold.tok_end, positions)):
                    kept[position] = min(kept.get(position, hold.from_step), hold.from_step)
        self._layers = {layer: self._tables(heads, positions, device) for layer, heads in sorted(since.items())}
        self._owner = torch.full((positions + 1,), WINDOW, dtype=torch.int32, device=device)
        """span of each position"""
        self._begin = [
            (hold.from_step, layer, head, hold.span, None if hold.whole else float(hold.tok_end - hold.tok_start))
            for hold in holds
            for layer, head in hold.heads
        ]

    def _tables(self, heads: dict[int, dict[int, int]], positions: int, device: torch.device) -> _Zone:
        width = max(map(len, heads.values()))
        since = torch.full((self.kv_heads, width), NEVER, dtype=torch.int32)
        position = torch.full((self.kv_heads, width), positions, dtype=torch.int64)
        heads_at: dict[int, list[tuple[int, int]]] = {}
        for head, kept in heads.items():
            for place, at in enumerate(sorted(kept)):
                since[head, place], position[head, place] = kept[at], at
                heads_at.setdefault(at, []).append((head, place))
        begins = min(max(step, at - self.prompt_tokens) for kept in heads.values() for at, step in kept.items())
        covers = torch.zeros(self.kv_heads, positions + 1, dtype=torch.bool, device=device)
        return _Zone(since.to(device), position.to(device), covers, heads_at, begins)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the zone needs beside its slots."""
        if not self._layers:
            return ()
        return self._owner, *(t for layer in self._layers.values() for t in (layer.since, layer.position, layer.covers))

    @property
    def tokens(self) -> int:
        """(token, layer, KV head) that are held and written by now."""
        return sum(int(tables.covers.sum()) for tables in self._layers.values())

    def slot_bytes(self, shape: KVShape) -> int:
        """Device bytes of the zone. All KV heads of a layer have as many slots as the one that holds most."""
        return sum(Zones(0, 0, 0, 0, tables.since.shape[1]).layer_bytes(shape) for tables in self._layers.values())

    def widen(self, layout: Layout, layers: int) -> Layout:
        """The method's layout with room for what is held, in the layers that hold something."""
        if not self._layers:
            return layout
        width = {layer: tables.since.shape[1] for layer, tables in self._layers.items()}
        zones = [
            tuple(replace(layout.of(layer, head), held=width.get(layer, 0)) for head in range(self.kv_heads))
            for layer in range(layers)
        ]
        return replace(layout, zones=tuple(heads if len(set(heads)) > 1 else heads[0] for heads in zones))

    # ---- what lies here
    def place(self, hot: HotTier, prompt: PromptStore) -> None:
        """Copy the prompt's part, before the prompt's KV is given back. Nothing of it is attended yet."""
        for layer, tables in self._layers.items():
            for heads, slots in self._zones(hot, layer):
                slots.position.copy_(torch.where(tables.since < NEVER, tables.position, -1)[heads])
                for place, head in enumerate(range(self.kv_heads)[heads]):
                    here = tables.position[head] < prompt.tokens
                    at = tables.position[head, here]
                    slots.keys[place, here] = prompt.keys[layer, head, at]
                    slots.values[place, here] = prompt.values[layer, head, at]

    def write(self, hot: HotTier, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The step's token, where it is to be held: keys, values [H_kv, D]."""
        if layer not in self._layers:
            return
        for head, place in self._layers[layer].heads_at.get(position, ()):
            pool = hot.pool(layer, head)
            slots, at = pool.slots(layer).after(pool.start["held"]), head - pool.heads.start
            slots.keys[at, place], slots.values[at, place] = keys[head], values[head]

    def name(self, hot: HotTier, start: int, end: int, span: int) -> None:
        """Positions [start, end) are span `span` from now on."""
        if not self._layers:
            return
        self._owner[start:end] = span
        for layer, tables in self._layers.items():
            for heads, slots in self._zones(hot, layer):
                slots.span.copy_(self._owner[tables.position[heads]])

    def start_step(self, hot: HotTier, step: int, position: int) -> list[tuple[int, int, int, float | None]]:
        """The step whose token will lie at `position` begins: what is held and written by then is attended in it.
        Returns the (layer, KV head, span, how many of its tokens, None for all) that are held from this step on."""
        self.step = step
        for layer, tables in self._layers.items():
            live = (tables.since <= step) & (tables.position <= position)
            for heads, slots in self._zones(hot, layer):
                slots.role.copy_(torch.where(live[heads], ROLE["resident"], FREE))
            tables.covers.zero_().scatter_(1, torch.where(live, tables.position, tables.covers.shape[1] - 1), True)
            tables.covers[:, -1] = False
        return [told[1:] for told in self._begin if told[0] == step]

    # ---- attention
    def live(self, layer: int) -> bool:
        """Whether the layer attends anything here at this step."""
        return layer in self._layers and self.step >= self._layers[layer].begins

    def counted(self, layer: int, selection: Selection) -> Selection:
        """The selection with its blend's share of the output grown by what is held beside what it attends."""
        if selection.blend is None or selection.positions is None or not self.live(layer):
            return selection
        blend, covered = selection.blend, self._layers[layer].covers[:, None, :-1]
        more = (blend.weights * (covered & ~selection.positions)).sum(-1)
        return replace(selection, blend=replace(blend, share=(blend.share + more).clamp(max=1)))

    def show(self, layer: int, heads: slice, slots: Slots, bias: torch.Tensor) -> torch.Tensor:
        """The method's bias [h, G, C] over some KV heads' slots, with what is held attended as it is here, and hidden
        wherever else it lies."""
        tables = self._layers[layer]
        zone = bias.shape[-1] - tables.since.shape[1]
        nowhere = tables.covers.shape[1] - 1
        where = slots.position[:, :zone].long()
        hidden = tables.covers[heads].gather(1, torch.where(where < 0, nowhere, where))
        bias[..., :zone].masked_fill_(hidden[:, None], float("-inf"))
        free = slots.role[:, zone:] == FREE
        bias[..., zone:] = torch.zeros_like(bias[..., zone:]).masked_fill(free[:, None], float("-inf"))
        return bias

    def _zones(self, hot: HotTier, layer: int) -> Iterator[tuple[slice, Slots]]:
        """Views of the layer's held slots, and whose they are."""
        for pool in hot.pools_of(layer):
            yield pool.at[1], pool.slots(layer).after(pool.start["held"])


@dataclass(frozen=True)
class _Mask:
    """One layer's dropped positions."""

    since: torch.Tensor
    """int32 [H_kv, P + 1]: first step at which the position is dropped, NEVER: at none; the last one is no position"""
    hidden: torch.Tensor
    """bool [H_kv, P + 1]: positions that are dropped at this step"""
    begins: int
    """first step at which any is"""


class Dropped:
    """Owns which positions each KV head leaves out, and from when on. Empty for a run without drops."""

    def __init__(self, drops: Sequence[Drop], kv_heads: int, positions: int, device: torch.device) -> None:
        """positions: of the whole run."""
        self.step = self.position = -1
        since: dict[int, torch.Tensor] = {}
        for drop in drops:
            for layer, head in drop.heads:
                if layer not in since:
                    since[layer] = torch.full((kv_heads, positions + 1), NEVER, dtype=torch.int32)
                since[layer][head, drop.tok_start : min(drop.tok_end, positions)].clamp_(max=drop.from_step)
        self._layers = {
            layer: _Mask(table.to(device), torch.zeros_like(table, dtype=torch.bool, device=device), int(table.min()))
            for layer, table in sorted(since.items())
        }
        self._begin = [
            (drop.from_step, layer, head, drop.span, None if drop.whole else float(drop.tok_end - drop.tok_start))
            for drop in drops
            for layer, head in drop.heads
        ]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the mask needs on the device."""
        return tuple(table for layer in self._layers.values() for table in (layer.since, layer.hidden))

    def start_step(self, step: int, position: int) -> list[tuple[int, int, int, float | None]]:
        """The step whose token will lie at `position` begins. Returns the (layer, KV head, span, how many of its
        tokens, None for all) that are dropped from this step on."""
        self.step, self.position = step, position
        for tables in self._layers.values():
            tables.hidden.copy_(tables.since <= step)
            tables.hidden[:, position] = False
        return [told[1:] for told in self._begin if told[0] == step]

    def live(self, layer: int) -> bool:
        """Whether the layer leaves anything out at this step."""
        return layer in self._layers and self.step >= self._layers[layer].begins

    def counted(self, layer: int, selection: Selection) -> Selection:
        """The selection with its blend's share of the output made smaller by what it attends and what is dropped: the
        mean value stands in for that as for whatever else is not attended."""
        if selection.blend is None or selection.positions is None or not self.live(layer):
            return selection
        blend, hidden = selection.blend, self._layers[layer].hidden[:, None, :-1]
        less = (blend.weights * (hidden & selection.positions)).sum(-1)
        return replace(selection, blend=replace(blend, share=(blend.share - less).clamp(min=0)))

    def hide(self, layer: int, heads: slice, slots: Slots, spans: SpanTable, bias: torch.Tensor) -> torch.Tensor:
        """The bias [h, G, C] over some KV heads' slots without what is dropped, in place."""
        hidden = self._layers[layer].hidden[heads]
        where = slots.position.long()
        gone = hidden.gather(1, torch.where(where < 0, hidden.shape[1] - 1, where))
        summary = slots.role == ROLE["coarse"]
        gone = torch.where(summary, _whole(hidden, spans).gather(1, slots.span.long()), gone)
        bias.masked_fill_(gone[:, None], float("-inf"))
        own = (slots.position == self.position) & ~summary & (slots.role != FREE)
        nothing = (bias == float("-inf")).all(-1, keepdim=True)
        return bias.masked_fill_(nothing & own[:, None], 0.0)


def _whole(hidden: torch.Tensor, spans: SpanTable) -> torch.Tensor:
    """bool [h, S]: spans that have tokens, all of which are in hidden [h, P + 1]."""
    before = F.pad(hidden[:, :-1].long().cumsum(1), (1, 0))
    start, end = spans.ranges().clamp(max=before.shape[1] - 1).to(hidden.device).unbind(1)
    whole = (before[:, end] - before[:, start] == end - start) & (end > start)
    return F.pad(whole, (0, spans.capacity - whole.shape[1]))
