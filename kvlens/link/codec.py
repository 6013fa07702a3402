"""What a codec makes of spans on their way to the cold tier, and what it makes of it again on the device. A method
brings its own; without one, tokens lie as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch


@dataclass(frozen=True)
class Cut:
    """A span on its way to the cold tier: its id and its positions [start, end)."""

    span: int
    start: int
    end: int


@dataclass(frozen=True)
class Packed:
    """What a codec made of S spans for l layers and H_kv KV heads; units that stay raw have size 0.

    numbers [N]: all units, layer after layer; begin: where each layer's begin in it, and N. table int64 [l, H_kv, S, 4]
    on the host: where a unit begins among its layer's numbers, tokens, ranks of keys and values, all 0 where raw; size
    int64 [l, H_kv, S] in numbers; errors float32 [l, H_kv, S, 2]: relative Frobenius errors of keys and values.
    """

    form: str
    numbers: torch.Tensor
    begin: list[int]
    table: torch.Tensor
    size: torch.Tensor
    errors: torch.Tensor


@dataclass(frozen=True)
class Units:
    """n packed units of one layer, to be unpacked together: table int64 [n, 4] into their numbers (as Packed.table),
    start int64 [n]: positions of their first tokens; tokens: of the longest span there can be; dim: head size; kv_heads
    int64 [n]."""

    table: torch.Tensor
    start: torch.Tensor
    layer: int
    tokens: int
    dim: int
    kv_heads: torch.Tensor

    def to(self, device: torch.device) -> Units:
        table, start, kv_heads = (x.to(device) for x in (self.table, self.start, self.kv_heads))
        return replace(self, table=table, start=start, kv_heads=kv_heads)


class Codec(Protocol):
    """How a method wants spans stored in the cold tier."""

    def pack(self, keys: torch.Tensor, values: torch.Tensor, first: int, cuts: Sequence[Cut]) -> Packed | None:
        """keys, values [l, H_kv, m, D] of the positions from `first` on, of which `cuts` are packed together; None:
        they lie as they are."""

    def unpack(self, numbers: torch.Tensor, units: Units) -> tuple[torch.Tensor, torch.Tensor]:
        """The units' numbers after they came to the device -> keys, values [n, T, D], T = units.tokens; whatever is
        behind a span's end."""


class RawCodec:
    """Exact keys and values, nothing computed."""

    def pack(self, keys: torch.Tensor, values: torch.Tensor, first: int, cuts: Sequence[Cut]) -> Packed | None:
        return None

    def unpack(self, numbers: torch.Tensor, units: Units) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("nothing was packed")
