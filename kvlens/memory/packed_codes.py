"""Keys and values of layers in few bits: how they are packed and restored. Each store owns the codes of one kind, layer
by layer.

Grouped keys: per channel, over groups of consecutive tokens; grouped values: per token, over groups of channels
(kvlens/kernels/quantise.py). Rotated vectors: kvlens/memory/rotated_codes.py. Shapes: h KV heads, m tokens, D head
size, g tokens or channels of a group.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvlens.kernels.code_bytes import code_bytes
from kvlens.kernels.quantise import Packed, quantise, restore
from kvlens.memory.layout import ROTATED, Quantised
from kvlens.memory.rotated_codes import RotatedVectors, random_directions
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


class GroupedKeys:
    """Keys per channel, over groups of tokens."""

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
        """bits, rows: of each layer, rows being tokens in whole groups; heads: KV heads that share a row's number."""
        self._bits, self._group, self._dtype = bits, group, dtype
        self._layers = [
            _room(heads, (count // group, size), group, width, group, device)
            for width, count in zip(bits, rows, strict=True)
        ]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(part for layer in self._layers for part in layer)

    def put(self, layer: int, heads: slice, start: int, states: torch.Tensor) -> None:
        rows = states.unflatten(1, (-1, self._group)).transpose(2, 3)
        place = start // self._group
        for stored, new in zip(self._layers[layer], quantise(rows, self._bits[layer], self._group), strict=True):
            stored[heads, place : place + new.shape[1]] = new

    def get(self, layer: int, heads: slice, until: int) -> torch.Tensor:
        packed = Packed(*(part[heads, : until // self._group] for part in self._layers[layer]))
        rows = restore(packed, self._group, self._bits[layer], self._group, self._dtype)
        return rows.transpose(2, 3).flatten(1, 2)


class GroupedValues:
    """Values per token, over groups of channels."""

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
        self._bits, self._group, self._size, self._dtype = bits, group, size, dtype
        self._layers = [
            _room(heads, (count,), size, width, group, device) for width, count in zip(bits, rows, strict=True)
        ]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(part for layer in self._layers for part in layer)

    def put(self, layer: int, heads: slice, start: int, states: torch.Tensor) -> None:
        for stored, new in zip(self._layers[layer], quantise(states, self._bits[layer], self._group), strict=True):
            stored[heads, start : start + new.shape[1]] = new

    def get(self, layer: int, heads: slice, until: int) -> torch.Tensor:
        packed = Packed(*(part[heads, :until] for part in self._layers[layer]))
        return restore(packed, self._size, self._bits[layer], self._group, self._dtype)


def open_codes(
    shape: KVShape, form: Quantised, heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[Codes, Codes, tuple[torch.Tensor, ...]]:
    """Return the stores of keys and values, and the tensors that both share. heads: KV heads that have rows of their
    own: all of the model's, or 1 where the tokens of a layer's KV heads follow one another."""
    layers, size = range(shape.layers), shape.head_dim
    rows = [form.rows(layer, shape.kv_heads) for layer in layers]
    bits = [form.bits_of(layer) for layer in layers]
    key_rows, value_rows = ([pair[side] // heads for pair in rows] for side in (0, 1))
    key_bits, value_bits = ([pair[side] for pair in bits] for side in (0, 1))
    if form.form == ROTATED:
        turn, signs = random_directions(size, form.corrected, form.seed, device)
        keys = RotatedVectors(key_bits, heads, key_rows, turn, signs, dtype)
        values = RotatedVectors(value_bits, heads, value_rows, turn, None, dtype)
        return keys, values, (turn,) if signs is None else (turn, signs)
    grouped = form.group, size, dtype, device
    return (
        GroupedKeys(key_bits, heads, key_rows, *grouped),
        GroupedValues(value_bits, heads, value_rows, *grouped),
        (),
    )
