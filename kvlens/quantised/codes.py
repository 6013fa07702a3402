"""Keys and values of layers in few bits: how they are packed and restored. Each store owns the codes of one kind, layer
by layer.

Grouped keys: per channel, over groups of consecutive tokens; grouped values: per token, over groups of channels
(kvlens/kernels/quantise.py). Rotated vectors: kvlens/quantised/rotated.py. Shapes: h KV heads, m tokens, D head
size, g tokens or channels of a group.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvlens.kernels.code_bytes import code_bytes
from kvlens.kernels.quantise import Packed, quantise, restore
from kvlens.quantised.form import ROTATED, Quantised
from kvlens.quantised.rotated import RotatedVectors, random_directions
from kvlens.shape import KVShape


class Codes(Protocol):
    """What is packed of keys, or of values."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors."""

    def put(self, layer: int, heads: slice, start: int, states: torch.Tensor) -> None:
        """Pack states [h, m, D] of the tokens from `start` on; whole groups of keys."""

    def get(self, layer: int, heads: slice, until: int) -> torch.Tensor:
        """Return the states [h, until, D] below `until`, as far as the bits hold them."""


def _room(heads: int, rows: tuple[int, ...], numbers: int, bits: int, group: int, device: torch.device) -> Packed:
    """Return room for rows of `numbers` numbers."""
    size, groups = (heads, *rows), -(-numbers // group)
    codes = torch.zeros(*size, code_bytes(numbers, bits), dtype=torch.uint8, device=device)
    scale = torch.zeros(*size, groups, dtype=torch.float16, device=device)
    return Packed(codes, scale, torch.zeros_like(scale))


class Grouped:
    """Codes of all layers, in groups of neighbours that share a scale and a zero."""

    def __init__(self, bits: list[int], rooms: list[Packed], group: int, size: int, dtype: torch.dtype) -> None:
        """bits, rooms: of each layer; size: numbers of a head."""
        self._bits, self._layers, self._group, self._size, self._dtype = bits, rooms, group, size, dtype

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(part for layer in self._layers for part in layer)

    def _put(self, layer: int, heads: slice, place: int, rows: torch.Tensor) -> None:
        """Pack rows into the layer's room, from the row `place` on."""
        for stored, new in zip(self._layers[layer], quantise(rows, self._bits[layer], self._group), strict=True):
            stored[heads, place : place + new.shape[1]] = new

    def _get(self, layer: int, heads: slice, until: int, numbers: int) -> torch.Tensor:
        """Return the rows below `until`, each of so many numbers."""
        packed = Packed(*(part[heads, :until] for part in self._layers[layer]))
        return restore(packed, numbers, self._bits[layer], self._group, self._dtype)


class GroupedKeys(Grouped):
    """Keys per channel, over groups of tokens: a row is a channel of a group."""

    def put(self, layer: int, heads: slice, start: int, states: torch.Tensor) -> None:
        self._put(layer, heads, start // self._group, states.unflatten(1, (-1, self._group)).transpose(2, 3))

    def get(self, layer: int, heads: slice, until: int) -> torch.Tensor:
        return self._get(layer, heads, until // self._group, self._group).transpose(2, 3).flatten(1, 2)


class GroupedValues(Grouped):
    """Values per token, over groups of channels: a row is a token."""

    def put(self, layer: int, heads: slice, start: int, states: torch.Tensor) -> None:
        self._put(layer, heads, start, states)

    def get(self, layer: int, heads: slice, until: int) -> torch.Tensor:
        return self._get(layer, heads, until, self._size)


def open_codes(
    shape: KVShape, form: Quantised, heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[Codes, Codes, tuple[torch.Tensor, ...]]:
    """Return the stores of keys and values, and the tensors that both share. heads: KV heads that have rows of their
    own: all of the model's, or 1 where the tokens of a layer's KV heads follow one another."""
    layers, size = range(shape.layers), shape.head_dim
    tokens = [form.rows(layer, shape.kv_heads) for layer in layers]
    bits = [form.bits_of(layer) for layer in layers]
    key_rows, value_rows = ([pair[side] // heads for pair in tokens] for side in (0, 1))
    key_bits, value_bits = ([pair[side] for pair in bits] for side in (0, 1))
    if form.form == ROTATED:
        turn, signs = random_directions(size, form.corrected, form.seed, device)
        keys = RotatedVectors(key_bits, heads, key_rows, turn, signs, dtype)
        values = RotatedVectors(value_bits, heads, value_rows, turn, None, dtype)
        return keys, values, (turn,) if signs is None else (turn, signs)
    group = form.group
    key_rooms = [
        _room(heads, (rows // group, size), group, width, group, device)
        for width, rows in zip(key_bits, key_rows, strict=True)
    ]
    value_rooms = [
        _room(heads, (rows,), size, width, group, device) for width, rows in zip(value_bits, value_rows, strict=True)
    ]
    shared = group, size, dtype
    return GroupedKeys(key_bits, key_rooms, *shared), GroupedValues(value_bits, value_rooms, *shared), ()
