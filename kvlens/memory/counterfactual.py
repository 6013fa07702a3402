"""What a counterfactual changes: token ranges held exactly, and token ranges dropped from the attention, for chosen
(layer, KV head), whatever the method does with them.

Held tokens have a zone of slots behind all others. A layer attends the zone from the first step at which a token in it
is held and written; until then it attends the same slots as without a hold. A drop is a mask over the slots that a step
attends: nothing moves and nothing is freed, so the method keeps its budget and decides as if the tokens were attended.
The tables of both are on the device, beside the budget, in the account under `held` and `dropped`. What a sliding
window hides needs no table: each step's mask has it.

A summary entry is masked where all tokens of its span are dropped. It stays where some of them are left, or where it
stands for no span's tokens. A step's own token is attended in its step; a query head that has nothing else left attends
that token alone.

Shapes: H_kv KV heads, h of a part of a layer, G query heads of each, m held slots of a layer, P positions of the run, C
slots, S spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvlens.holds import Drop, Hold
from kvlens.memory.placement import Selection
from kvlens.shape import KVShape
from kvlens.tiers.hot import HotTier
from kvlens.tiers.layout import Layout, Zones
from kvlens.tiers.slots import FREE, ROLE, WINDOW, PromptStore, Slots, SpanTable

NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class _Zone:
    """The held slots of one layer."""

    since: torch.Tensor
    """int32 [H_kv, m]: first step at which the slot's token is held; NEVER: the slot is not used"""
    position: torch.Tensor
    """int64 [H_kv, m], P where the slot is not used"""
    covers: torch.Tensor
    """bool [H_kv, P + 1]: positions that are attended here, and nowhere else, at this step"""
    slots_at: dict[int, list[tuple[int, int]]]
    """position -> (KV head, place in the zone) of the slots that hold it"""
    begins: int
    """first step at which any slot is attended"""


@dataclass(frozen=True)
class _Mask:
    """The dropped positions of one layer."""

    since: torch.Tensor
    """int32 [H_kv, P + 1]: first step at which the position is dropped, NEVER: at none; the last one is no position"""
    hidden: torch.Tensor
    """bool [H_kv, P + 1]: positions that are dropped at this step"""
    begins: int
    """first step at which any position is dropped"""


class Counterfactual:
    """Owns which positions each KV head holds or leaves out, and from which step on."""

    def __init__(
        self,
        holds: Sequence[Hold],
        drops: Sequence[Drop],
        kv_heads: int,
        prompt_tokens: int,
        positions: int,
        device: torch.device,
        windows: Sequence[int] = (),
    ) -> None:
        """prompt_tokens: positions below it are written when prefill ends, later ones one per step; positions: of the
        whole run; windows: per layer, tokens that a step sees, 0: all; older ones are masked as dropped ones are."""
        self.kv_heads, self.positions = kv_heads, positions
        self.step = self.position = -1
        since: dict[int, dict[int, dict[int, int]]] = {}
        for hold in holds:
            for layer, head in hold.heads:
                steps = since.setdefault(layer, {}).setdefault(head, {})
                for position in range(hold.tok_start, min(hold.tok_end, positions)):
                    steps[position] = min(steps.get(position, hold.from_step), hold.from_step)
        self._zones = {layer: self._zone(heads, prompt_tokens, device) for layer, heads in sorted(since.items())}
        self._windows = {layer: window for layer, window in enumerate(windows) if window}
        masks: dict[int, torch.Tensor] = {}
        for drop in drops:
            for layer, head in drop.heads:
                if layer not in masks:
                    masks[layer] = torch.full((kv_heads, positions + 1), NEVER, dtype=torch.int32)
                masks[layer][head, drop.tok_start : min(drop.tok_end, positions)].clamp_(max=drop.from_step)
        self._masks = {
            layer: _Mask(table.to(device), torch.zeros_like(table, dtype=torch.bool, device=device), int(table.min()))
            for layer, table in sorted(masks.items())
        }
        self._owner = torch.full((positions + 1,), WINDOW, dtype=torch.int32, device=device)
        """span of each position"""
        self._starts = [
            (change.from_step, change.verb, layer, head, change.span, tokens)
            for change in (*holds, *drops)
            for tokens in (None if change.whole else float(change.tok_end - change.tok_start),)
            for layer, head in change.heads
        ]

    def _zone(self, heads: dict[int, dict[int, int]], prompt_tokens: int, device: torch.device) -> _Zone:
        width = max(map(len, heads.values()))
        since = torch.full((self.kv_heads, width), NEVER, dtype=torch.int32)
        positions = torch.full((self.kv_heads, width), self.positions, dtype=torch.int64)
        slots_at: dict[int, list[tuple[int, int]]] = {}
        for head, steps in heads.items():
            for place, position in enumerate(sorted(steps)):
                since[head, place], positions[head, place] = steps[position], position
                slots_at.setdefault(position, []).append((head, place))
        begins = min(
            max(step, position - prompt_tokens) for steps in heads.values() for position, step in steps.items()
        )
        covers = torch.zeros(self.kv_heads, self.positions + 1, dtype=torch.bool, device=device)
        return _Zone(since.to(device), positions.to(device), covers, slots_at, begins)

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the tables on the device, beside the held slots, by their name in the account."""
        zones = [table for zone in self._zones.values() for table in (zone.since, zone.position, zone.covers)]
        masks = [table for mask in self._masks.values() for table in (mask.since, mask.hidden)]
        tables = {"held": (self._owner, *zones) if zones else (), "dropped": tuple(masks)}
        return {name: tensors for name, tensors in tables.items() if tensors}

    def slot_bytes(self, shape: KVShape) -> int:
        """Return the device bytes of the held slots. All KV heads of a layer have as many as the one that holds
        most."""
        return sum(Zones(0, 0, 0, 0, zone.since.shape[1]).layer_bytes(shape) for zone in self._zones.values())

    def widen(self, layout: Layout, layers: int) -> Layout:
        """Return the method's layout with room for the held tokens, in the layers that hold some."""
        if not self._zones:
            return layout
        width = {layer: zone.since.shape[1] for layer, zone in self._zones.items()}
        zones = [
            tuple(replace(layout.zones_of(layer, head), held=width.get(layer, 0)) for head in range(self.kv_heads))
            for layer in range(layers)
        ]
        return replace(layout, zones=tuple(heads if len(set(heads)) > 1 else heads[0] for heads in zones))

    # ---- the held slots
    def place(self, hot: HotTier, prompt: PromptStore) -> None:
        """Copy the prompt's part into the zone. No slot of it is attended yet."""
        for layer, zone, heads, slots in self._slots(hot):
            slots.position.copy_(torch.where(zone.since < NEVER, zone.position, -1)[heads])
            for place, head in enumerate(range(self.kv_heads)[heads]):
                written = zone.position[head] < prompt.tokens
                positions = zone.position[head, written]
                slots.keys[place, written] = prompt.keys[layer, head, positions]
                slots.values[place, written] = prompt.values[layer, head, positions]

    def write(self, hot: HotTier, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's token where it is to be held: keys, values [H_kv, D]."""
        if layer not in self._zones:
            return
        for head, place in self._zones[layer].slots_at.get(position, ()):
            pool = hot.pool(layer, head)
            slots, row = pool.held(layer), head - pool.heads.start
            slots.keys[row, place], slots.values[row, place] = keys[head], values[head]

    def name(self, hot: HotTier, start: int, end: int, span: int) -> None:
        """Name positions [start, end) as tokens of `span` from now on."""
        self._owner[start:end] = span
        for _, zone, heads, slots in self._slots(hot):
            slots.span.copy_(self._owner[zone.position[heads]])

    def start_step(self, hot: HotTier, step: int, position: int) -> list[tuple[str, int, int, int, float | None]]:
        """Begin the step whose token is at `position`: tokens that are held and written by then are attended in it.
        Return the (verb, layer, KV head, span, number of its tokens, None for all) that are held or dropped from this
        step on."""
        self.step, self.position = step, position
        for layer, zone in self._zones.items():
            live = (zone.since <= step) & (zone.position <= position)
            for pool in hot.parts[layer]:
                pool.held(layer).role.copy_(torch.where(live[pool.index[1]], ROLE["resident"], FREE))
            zone.covers.zero_().scatter_(1, torch.where(live, zone.position, self.positions), True)
            zone.covers[:, -1] = False
        for mask in self._masks.values():
            mask.hidden.copy_(mask.since <= step)
            mask.hidden[:, position] = False
        return [start[1:] for start in self._starts if start[0] == step]

    def _slots(self, hot: HotTier) -> Iterator[tuple[int, _Zone, slice, Slots]]:
        """Yield each layer with held slots, its zone, and for each part its KV heads and views of their slots."""
        for layer, zone in self._zones.items():
            for pool in hot.parts[layer]:
                yield layer, zone, pool.index[1], pool.held(layer)

    # ---- attention
    def holds(self, layer: int) -> bool:
        """Return True if the layer attends held slots at this step."""
        return layer in self._zones and self.step >= self._zones[layer].begins

    def drops(self, layer: int) -> bool:
        """Return True if the layer leaves positions out at this step."""
        leaves_out = layer in self._masks and self.step >= self._masks[layer].begins
        return leaves_out or (layer in self._windows and self.position >= self._windows[layer])

    def _hidden(self, layer: int, heads: slice = slice(None)) -> torch.Tensor:
        """Return bool [h, P + 1]: positions that some KV heads leave out at this step, dropped or older than the
        window. What a window hides is computed for the call: nothing of it is kept on the device."""
        dropped = self._masks[layer].hidden[heads] if layer in self._masks else None
        if layer not in self._windows:
            assert dropped is not None, "the layer leaves nothing out"
            return dropped
        older = torch.arange(self.positions + 1, device=self._owner.device) <= self.position - self._windows[layer]
        return older.expand(len(range(self.kv_heads)[heads]), -1) if dropped is None else dropped | older

    def counted(self, layer: int, selection: Selection) -> Selection:
        """Return the selection with its blend's share of the output grown by the held tokens beside those it attends,
        and made smaller by the dropped tokens: the mean value stands in for them."""
        blend, positions = selection.blend, selection.positions
        if blend is None or positions is None:
            return selection
        share = blend.share
        if self.holds(layer):
            covered = self._zones[layer].covers[:, None, :-1]
            share = (share + (blend.weights * (covered & ~positions)).sum(-1)).clamp(max=1)
        if self.drops(layer):
            hidden = self._hidden(layer)[:, None, :-1]
            share = (share - (blend.weights * (hidden & positions)).sum(-1)).clamp(min=0)
        return replace(selection, blend=replace(blend, share=share))

    def show(self, layer: int, heads: slice, slots: Slots, bias: torch.Tensor) -> torch.Tensor:
        """Return the method's bias [h, G, C] over some KV heads' slots, changed in place: held tokens are attended in
        their zone and hidden elsewhere."""
        zone = self._zones[layer]
        end = bias.shape[-1] - zone.since.shape[1]
        where = slots.position[:, :end].long()
        hidden = zone.covers[heads].gather(1, torch.where(where < 0, self.positions, where))
        bias[..., :end].masked_fill_(hidden[:, None], float("-inf"))
        free = slots.role[:, end:] == FREE
        bias[..., end:] = torch.zeros_like(bias[..., end:]).masked_fill(free[:, None], float("-inf"))
        return bias

    def hide(self, layer: int, heads: slice, slots: Slots, spans: SpanTable, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias [h, G, C] over some KV heads' slots without the dropped tokens, changed in place."""
        hidden = self._hidden(layer, heads)
        where = slots.position.long()
        is_dropped = hidden.gather(1, torch.where(where < 0, self.positions, where))
        summary = slots.role == ROLE["coarse"]
        is_dropped = torch.where(summary, spans.covered(hidden).gather(1, slots.span.long()), is_dropped)
        bias.masked_fill_(is_dropped[:, None], float("-inf"))
        is_newest = (slots.position == self.position) & ~summary & (slots.role != FREE)
        nothing = (bias == float("-inf")).all(-1, keepdim=True)
        return bias.masked_fill_(nothing & is_newest[:, None], 0.0)
