"""Keys and values of layers in few bits: how they are packed and restored. Each store owns the codes of one kind, layer
by layer.

Grouped keys: per channel, over groups of consecutive tokens; grouped values: per token, over groups of channels
(kvlens/kernels/quantise.py). Rotated vectors: kvlens/quantised/rotated.py. Shapes: h KV heads, m tokens, D head
size, g tokens or channels of a group.
"""

from __future__ import annotations

from itertools import groupby

import torch

from kvlens.finer import EXACT, KEYS, SIDES
from kvlens.kernels.code_bytes import code_bytes
from kvlens.kernels.quantise import Packed, quantise, restore
from kvlens.quantised.form import MERGED, PRUNED, ROTATED, SHARED, Quantised, Turn
from kvlens.quantised.merged import MergedLayers
from kvlens.quantised.rotated import RotatedVectors, random_directions
from kvlens.quantised.shared import SharedLayers
from kvlens.quantised.stored import Codes, Heads
from kvlens.shape import KVShape


def _room(heads: int, rows: tuple[int, ...], numbers: int, bits: int, group: int, device: torch.device) -> Packed:
    """Return room for rows of `numbers` numbers."""
    size, groups = (heads, *rows), -(-numbers // group)
    codes = torch.zeros(*size, code_bytes(numbers, bits), dtype=torch.uint8, device=device)
    scale = torch.zeros(*size, groups, dtype=torch.float16, device=device)
    return Packed(codes, scale, torch.zeros_like(scale))


class _Grouped(Codes):
    """Codes of every layer in groups of numbers."""

    def __init__(
        self,
        bits: list[int],
        heads: int,
        rows: list[int],
        group: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """bits, rows: of each layer, rows being tokens, of keys in whole groups; heads: KV heads that share a row's
        number; size: channels."""
        self._bits, self._group, self._size, self._dtype = bits, group, size, dtype
        self._layers = [
            _room(heads, *self._lie(count), width, group, device) for width, count in zip(bits, rows, strict=True)
        ]

    def _lie(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Return how rows of numbers lie for so many tokens, and the numbers of a row."""
        raise NotImplementedError

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(part for layer in self._layers for part in layer)

    def get(self, layer: int, heads: Heads, until: int) -> torch.Tensor:
        codes = self._layers[layer].codes[heads]
        room = torch.empty(len(codes), until, self._size, dtype=self._dtype, device=codes.device)
        self.write(layer, heads, room)
        return room


class GroupedKeys(_Grouped):
    """Keys per channel, over groups of tokens."""

    def _lie(self, tokens: int) -> tuple[tuple[int, ...], int]:
        return (tokens // self._group, self._size), self._group

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        rows = states.unflatten(1, (-1, self._group)).transpose(2, 3)
        place = start // self._group
        for stored, new in zip(self._layers[layer], quantise(rows, self._bits[layer], self._group), strict=True):
            stored[heads, place : place + new.shape[1]] = new

    def write(self, layer: int, heads: Heads, room: torch.Tensor) -> None:
        packed = Packed(*(part[heads, : room.shape[1] // self._group] for part in self._layers[layer]))
        restore(packed, self._bits[layer], self._group, room.unflatten(1, (-1, self._group)).transpose(2, 3))


class GroupedValues(_Grouped):
    """Values per token, over groups of channels."""

    def _lie(self, tokens: int) -> tuple[tuple[int, ...], int]:
        return (tokens,), self._size

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        for stored, new in zip(self._layers[layer], quantise(states, self._bits[layer], self._group), strict=True):
            stored[heads, start : start + new.shape[1]] = new

    def write(self, layer: int, heads: Heads, room: torch.Tensor) -> None:
        packed = Packed(*(part[heads, : room.shape[1]] for part in self._layers[layer]))
        restore(packed, self._bits[layer], self._group, room)


class ExactRows(Codes):
    """Keys or values as they are."""

    def __init__(self, heads: int, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.zeros(heads, rows, size, dtype=dtype, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._rows,)

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        self._rows[heads, start : start + states.shape[1]] = states.to(self._rows.dtype)

    def get(self, layer: int, heads: Heads, until: int) -> torch.Tensor:
        return self._rows[heads, :until]


class PrunedKeys(Codes):
    """Keys in some channels, those of each KV head; the others come back as 0."""

    def __init__(self, channels: torch.Tensor, rows: list[int], size: int, dtype: torch.dtype) -> None:
        """channels: int64 [L, H_kv, c]; rows: of each layer; size: channels of a whole key."""
        self._channels, self._size = channels, size
        self._layers = [torch.zeros(channels.shape[1], count, channels.shape[2], dtype=dtype) for count in rows]
        self._layers = [layer.to(channels.device) for layer in self._layers]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._channels, *self._layers

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        index = self._channels[layer][heads][:, None].expand(-1, states.shape[1], -1)
        self._layers[layer][heads, start : start + states.shape[1]] = states.gather(2, index).to(
            self._layers[layer].dtype
        )

    def get(self, layer: int, heads: Heads, until: int) -> torch.Tensor:
        stored = self._layers[layer][heads, :until]
        index = self._channels[layer][heads][:, None].expand(-1, until, -1)
        return stored.new_zeros(*stored.shape[:2], self._size).scatter_(2, index, stored)


class ExactLayers(Codes):
    """Values as they are, layer by layer."""

    def __init__(self, heads: int, rows: list[int], size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = [ExactRows(heads, count, size, dtype, device) for count in rows]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for layer in self._layers for tensor in layer.tensors())

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        self._layers[layer].put(layer, heads, start, states)

    def get(self, layer: int, heads: Heads, until: int) -> torch.Tensor:
        return self._layers[layer].get(layer, heads, until)


class SplitCodes(Codes):
    """Codes of layers whose KV heads differ in bits: KV heads of equal bits share a store of one layer."""

    def __init__(self, layers: list[list[tuple[tuple[int, ...], Codes]]]) -> None:
        """layers: of each the KV heads of every store."""
        self._layers = layers

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for stores in self._layers for _, store in stores for tensor in store.tensors())

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        for store, members, rows in self._stores(layer, heads):
            store.put(0, members, start, states[rows])

    def get(self, layer: int, heads: Heads, until: int) -> torch.Tensor:
        parts = [(rows, store.get(0, members, until)) for store, members, rows in self._stores(layer, heads)]
        whole = parts[0][1].new_empty(sum(len(rows) for rows, _ in parts), *parts[0][1].shape[1:])
        for rows, part in parts:
            whole[rows] = part
        return whole

    def _stores(self, layer: int, heads: Heads) -> list[tuple[Codes, list[int], list[int]]]:
        """Return each store with its own numbers of the KV heads `heads`, and their places among these."""
        count = sum(len(members) for members, _ in self._layers[layer])
        head_list = list(range(count))[heads] if isinstance(heads, slice) else heads
        pairs = []
        for members, store in self._layers[layer]:
            shared = [head for head in head_list if head in members]
            if shared:
                pairs.append((store, [members.index(head) for head in shared], [head_list.index(h) for h in shared]))
        return pairs


def open_codes(
    shape: KVShape, form: Quantised, dtype: torch.dtype, device: torch.device, turn: Turn | None = None
) -> tuple[Codes, Codes, tuple[torch.Tensor, ...]]:
    """Return the stores of keys and values, each KV head with rows of its own, and the tensors that both share. turn:
    the model's rotary embedding, for a form that packs keys without it."""
    if form.form == SHARED:
        assert turn is not None or not form.turns, "keys that cannot be turned are packed as they are"
        shared_keys = SharedLayers(shape, form, form.rank_k, turn if form.turns else None, dtype, device)
        return shared_keys, SharedLayers(shape, form, form.rank_v, None, dtype, device), ()
    all_rows = [form.rows(layer, shape.kv_heads) for layer in range(shape.layers)]
    key_rows, value_rows = ([pair[side] // shape.kv_heads for pair in all_rows] for side in (0, 1))
    if form.form == PRUNED:
        channels = torch.tensor(form.kept_channels, dtype=torch.long, device=device)
        values = ExactLayers(shape.kv_heads, value_rows, shape.head_dim, dtype, device)
        return PrunedKeys(channels, key_rows, shape.head_dim, dtype), values, ()
    if form.form == MERGED:
        keys = MergedLayers(shape, form, key_rows, dtype, device)
        return keys, MergedLayers(shape, form, value_rows, dtype, device), ()
    directions, signs = None, None
    if form.form == ROTATED:
        directions, signs = random_directions(shape.head_dim, form.corrected, form.seed, device)

    def open_side(side: str, bits: list[int], heads: int, rows: list[int]) -> Codes:
        if bits == [EXACT]:
            return ExactRows(heads, rows[0], shape.head_dim, dtype, device)
        if directions is not None:
            return RotatedVectors(bits, heads, rows, directions, signs if side == KEYS else None, dtype)
        grouped = GroupedKeys if side == KEYS else GroupedValues
        return grouped(bits, heads, rows, form.group, shape.head_dim, dtype, device)

    stores = []
    for number, (side, rows) in enumerate(zip(SIDES, (key_rows, value_rows), strict=True)):
        bits = [form.bits_of(layer)[number] for layer in range(shape.layers)]
        finer_bits = {(unit.layer, unit.kv_head): unit.bits for unit in form.finer if unit.side == side}
        if not finer_bits:
            stores.append(open_side(side, bits, shape.kv_heads, rows))
            continue
        layers = []
        for layer, width in enumerate(bits):
            pairs = sorted((finer_bits.get((layer, head), width), head) for head in range(shape.kv_heads))
            split = [(tuple(head for _, head in run), finer) for finer, run in groupby(pairs, key=lambda pair: pair[0])]
            layers.append([(heads, open_side(side, [finer], len(heads), [rows[layer]])) for heads, finer in split])
        stores.append(SplitCodes(layers))
    return stores[0], stores[1], tuple(tensor for tensor in (directions, signs) if tensor is not None)
