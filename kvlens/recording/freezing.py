"""Freezes a step as it was when its attention had been computed: a few copies, on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from kvlens.kernels.attend import LayerForm, attention_shares, form_at
from kvlens.memory.memory import Memory
from kvlens.memory.placement import Selection
from kvlens.memory.windowed import WindowedLayers
from kvlens.recording.layerparts import WatchedKeys, joined, share_layers
from kvlens.recording.snapshot import Attended, DecidedStep, LayerInputs, PackedReads, Snapshot, Zooms, join, rank
from kvlens.tiers.hot import Pool
from kvlens.tiers.slots import ROLE, WINDOW, Slots


class Freezer:
    """Collects what the session shows of each layer and makes a Snapshot of the step; changes nothing."""

    def __init__(
        self, memory: Memory, windowed: WindowedLayers, decides: bool = True, forms: tuple[LayerForm, ...] = ()
    ) -> None:
        """decides: a selection is a decision of its step and layer; forms: of the model's layers, (): plain."""
        self.memory, self.windowed, self._decides, self._forms = memory, windowed, decides, forms
        self._watched: WatchedKeys | None = None
        """None: coverage is not recorded"""
        self._whole = not windowed.rings and not forms and memory.reads.in_order(memory.positions)
        """every token stays exactly in the slot of its position, of all layers and KV heads alike"""
        self._copied = [
            any(memory.reads.copies(number, part) for part in range(len(parts)))
            for number, parts in enumerate(memory.hot.parts)
        ]
        """of each of the method's layers: its slots are made for the attention"""
        self._seen: list[LayerInputs] = []
        self._previous: torch.Tensor | None = None

    def watch_keys(self, keys: torch.Tensor, max_new: int) -> None:
        """Keep all keys from now on. keys: the prompt's [L, H_kv, N, D], which must not change."""
        self._watched = WatchedKeys(self.memory, self.windowed, None if self._whole else keys, max_new)

    def layer(
        self,
        layer: int,
        q: torch.Tensor,
        biases: Sequence[torch.Tensor | None],
        scaling: float,
        selection: Selection | None,
        slots: Sequence[Slots],
    ) -> None:
        layer_inputs, number = LayerInputs(layer, q, biases, scaling, selection), self.windowed.own.get(layer)
        if number is not None and self._at_once(number, selection):
            layer_inputs.frozen = self._freeze_now(layer_inputs, slots), self.memory.spans.is_hot[number].clone()
        self._seen.append(layer_inputs)

    def _at_once(self, number: int, selection: Selection | None) -> bool:
        """Return whether a layer's slots are gone by the end of the step: a later layer or a recall may take them, or
        they are copies that would have to be made again."""
        taken = len(self.memory.layout.shared) == 1 or (selection is not None and selection.now is not None)
        return taken or self._copied[number]

    def snapshot(self, position: int) -> Snapshot:
        """The step whose token lies at `position`; nothing has been rearranged since its attention."""
        layer_inputs, memory = self._seen, self.memory
        whole = self._whole and all(s.selection is None and s.biases == [None] for s in layer_inputs)
        groups: list[Attended] = [self._tables(position + 1)] if whole else []
        for layers, members in () if whole else self._alike():
            if layers is None:
                groups.append(self._freeze_window(members[0]))
            else:
                groups.append(members[0].frozen[0] if members[0].frozen is not None else self._freeze(layers, members))
        q = torch.stack([s.q for s in layer_inputs]).float()
        selections = [s.selection for s in layer_inputs]
        ranked = [None if c is None else rank(c) for c in selections]
        shot = Snapshot(
            joined(groups),
            q,
            self._previous,
            self._zooms(),
            ranked,
            self._columns("head_columns", memory.shape.q_heads),
            self._columns("kv_columns", memory.shape.kv_heads),
            None if self._watched is None else self._watched.until(position),
            layer_inputs[0].scaling,
            memory.spans.capacity,
            entry_bytes=memory.shape.head_token_bytes,
            packed=self._packed_reads(),
            decided=self._decided(),
            index_bytes=tuple(0 if c is None else c.index_bytes for c in selections),
            forms=self._forms,
            keys=memory.hot.pools[0].keys[:, :, : position + 1] if whole else None,
        )
        self._previous, self._seen = q, []
        return shot

    def _alike(self) -> Iterator[tuple[range | None, list[LayerInputs]]]:
        """Runs of layers that can be frozen in one go: of one pool, none frozen before, a bias over equally many slots
        or none, and equally many packed tokens. A layer in several parts is a run of its own, and so is one with sink
        logits. With the method's numbers of the layers; None: a windowed layer."""
        packed = self.memory.packed

        def kind(layer_inputs: LayerInputs) -> tuple[int, int, int, int]:
            number, bias = self.windowed.own.get(layer_inputs.layer), layer_inputs.biases[0]
            if number is None:
                return -1, -1, -1, layer_inputs.layer
            pools = self.memory.hot.parts[number]
            alone = layer_inputs.frozen or len(pools) > 1 or self._form(layer_inputs.layer).sinks is not None
            slots, width = -1 if bias is None else bias.shape[-1], 0 if packed is None else packed.width(number)
            return pools[0].layers.start, slots, width, layer_inputs.layer if alone else -1

        for _, run in groupby(self._seen, key=kind):
            members = list(run)
            number = self.windowed.own.get(members[0].layer)
            yield None if number is None else range(number, number + len(members)), members

    def _form(self, layer: int) -> LayerForm:
        return form_at(self._forms, layer)

    def _freeze_window(self, layer_inputs: LayerInputs) -> Attended:
        """The attention of a layer that keeps its window: each token belongs to the span that it has elsewhere."""
        layer, bias, owner = layer_inputs.layer, layer_inputs.biases[0], torch.from_numpy(self.memory.spans.owner)
        keys, positions = self.windowed.live(layer)[0], self.windowed.positions(layer)
        named = torch.cat((owner, owner.new_full((self.windowed.newest + 1 - len(owner),), WINDOW)))
        span = named.to(positions.device)[positions]
        form = self._form(layer)
        weights, sink = attention_shares(layer_inputs.q, keys, bias, layer_inputs.scaling, form)
        size = (1, len(keys), len(positions))
        return Attended(
            weights[None],
            None if bias is None else bias[None] > -torch.inf,
            torch.full(size, ROLE["window"], dtype=torch.uint8, device=positions.device),
            span.to(torch.int32).expand(size).clone(),
            positions.to(torch.int32).expand(size).clone(),
            sink=None if sink is None else sink[None],
        )

    def _packed_reads(self) -> PackedReads | None:
        """What packed tokens save, by layer of the model; a windowed layer packs nothing."""
        packed = self.memory.packed
        if packed is None:
            return None
        numbers = [self.windowed.own.get(layer_inputs.layer) for layer_inputs in self._seen]
        by_layer, nothing = packed.form.saved(self.memory.shape), [(0.0, 0.0)] * self.memory.shape.kv_heads
        saved = [nothing if number is None else by_layer[number] for number in numbers]
        return PackedReads(saved, packed.values_until)

    def _zooms(self) -> Zooms | None:
        """What each layer could and did read token by token; None for methods that do not zoom."""
        memory, shape = self.memory, self.memory.shape
        if all(s.selection is None or s.selection.zoomable is None for s in self._seen):
            return None
        fine = torch.zeros(
            shape.layers, shape.kv_heads, shape.group, memory.spans.capacity, dtype=torch.bool, device=memory.device
        )
        hot = self.windowed.spread_hot(memory.spans.is_hot).clone()
        fine = self.windowed.spread_hot(fine)
        zoomable = torch.zeros_like(hot)
        for layer, s in enumerate(self._seen):
            if s.selection is not None and s.selection.zoomable is not None:
                fine[layer], zoomable[layer] = s.selection.fine, s.selection.zoomable
            if s.frozen is not None:
                hot[layer] = s.frozen[1]
        return Zooms(fine, hot[:, :, None], zoomable)

    def _decided(self) -> DecidedStep | None:
        selections = [layer.selection for layer in self._seen]
        if not self._decides or all(selection is None for selection in selections):
            return None
        hot = self.windowed.spread_hot(self.memory.spans.is_hot).clone()
        for number, layer in enumerate(self._seen):
            if layer.frozen is not None:
                hot[number] = layer.frozen[1]
        return DecidedStep(selections, hot, [self._numbered(units) for units in self.memory.host.recaller.refused])

    def _numbered(self, units: np.ndarray) -> np.ndarray:
        """Return units int64 [3, n] of the method's layers with the model's numbers."""
        return np.stack((np.array(self.windowed.numbers, np.int64)[units[0]], *units[1:]))

    def _columns(self, kind: str, heads: int) -> dict[str, torch.Tensor]:
        """Columns that the method itself logged, [L, heads], NaN for layers in which it did not."""
        columns: dict[str, torch.Tensor] = {}
        for layer, s in enumerate(self._seen):
            logged: dict[str, torch.Tensor] = {} if s.selection is None else getattr(s.selection, kind)
            for name, values in logged.items():
                if name not in columns:
                    columns[name] = torch.full((len(self._seen), heads), torch.nan, device=values.device)
                columns[name][layer] = values
        return columns

    def _tables(self, positions: int) -> Attended:
        """Return what the slots of the first `positions` hold, without weights: of all layers and KV heads alike."""
        shape, pool = self.memory.shape, self.memory.hot.pools[0]
        role, span, position = (
            table[:1, :1, :positions].clone().expand(shape.layers, shape.kv_heads, -1)
            for table in (pool.role, pool.span, pool.position)
        )
        none = torch.empty(shape.layers, shape.kv_heads, shape.group, 0, device=role.device)
        return Attended(none, None, role, span, position)

    def _freeze(self, layers: range, members: list[LayerInputs]) -> Attended:
        slots = [self.memory.reads.together(layers, bias, part) for part, bias in enumerate(members[0].biases)]
        return self._freeze_parts(layers, members, slots)

    def _freeze_now(self, layer_inputs: LayerInputs, slots: Sequence[Slots]) -> Attended:
        number = self.windowed.own[layer_inputs.layer]
        rows = [Slots(*(tensor[None] for tensor in vars(of_part).values())) for of_part in slots]
        return self._freeze_parts(range(number, number + 1), [layer_inputs], rows)

    def _freeze_parts(self, layers: range, members: list[LayerInputs], slots: Sequence[Slots]) -> Attended:
        """slots: of each part, with the layers [l, ...] in front."""
        pools = self.memory.hot.parts[layers.start]
        parts = [self._freeze_part(pool, members, part, slots[part]) for part, pool in enumerate(pools)]
        return parts[0] if len(parts) == 1 else join(parts)

    def _freeze_part(self, pool: Pool, members: list[LayerInputs], part: int, slots: Slots) -> Attended:
        q_heads = slice(pool.heads.start * self.memory.shape.group, pool.heads.stop * self.memory.shape.group)
        queries, biases = [s.q[q_heads] for s in members], [s.biases[part] for s in members]
        form = self._form(members[0].layer).take(q_heads)
        weights, visible, sink = share_layers(queries, slots.keys, biases, members[0].scaling, form)
        role, span, position = (table.clone() for table in (slots.role, slots.span, slots.position))
        share, summarised = stack_selections([s.selection for s in members], weights, pool.index[1])
        return Attended(weights, visible, role, span, position, share, sink, summarised)


def stack_selections(
    selections: Sequence[Selection | None], weights: torch.Tensor, heads: slice
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the shares by which layers blend their output, of some KV heads of layers with such weights [l, h, G, C],
    and the positions that the summaries which they read stand for, bool [l, h, G, P]. None: no layer blends its output;
    summaries stand for whole spans."""
    blends = [None if selection is None else selection.blend for selection in selections]
    tables = [None if selection is None else selection.summarised for selection in selections]
    shares, summarised, whole = None, None, weights.new_ones(weights.shape[1:3])
    if any(blend is not None for blend in blends):
        shares = torch.stack([whole if blend is None else blend.share[heads] for blend in blends])
    example = next((table for table in tables if table is not None), None)
    if example is not None:
        each = [(torch.zeros_like(example) if table is None else table)[heads] for table in tables]
        summarised = torch.stack([table.expand(-1, weights.shape[2], -1) for table in each])
    return shares, summarised
