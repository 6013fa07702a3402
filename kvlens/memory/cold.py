"""The cold tier: units of one (layer, span, KV head), raw or packed by a codec, in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvlens.memory.pinned import HostMemory, Pageable
from kvlens.shape import KVShape


@dataclass
class Unit:
    """What the cold tier holds of one span for one (layer, KV head)."""

    form: str
    """raw: payload [2, m, D] (keys, values); any other form: flat payload that only its codec reads"""
    payload: torch.Tensor
    tokens: int
    rank_k: int | None = None
    rank_v: int | None = None
    err_k: float | None = None
    err_v: float | None = None

    @property
    def bytes(self) -> int:
        return self.payload.numel() * self.payload.element_size()

    def part(self, first: int, count: int) -> torch.Tensor:
        """Tokens [first, first + count) of a raw unit: [2, count, D], a view."""
        return self.payload[:, first : first + count]


class Codec(Protocol):
    """How a method wants spans stored in the cold tier. `tokens` m, head size D."""

    def pack(self, keys: torch.Tensor, values: torch.Tensor, span: int) -> list[list[Unit]]:
        """keys, values [L, H_kv, m, D] of one span -> units [layer][KV head]. The payload may alias the input."""

    def unpack(self, unit: Unit, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The payload after it came to the device -> keys, values [m, D]."""


class RawCodec:
    """Exact keys and values, nothing computed."""

    def pack(self, keys: torch.Tensor, values: torch.Tensor, span: int) -> list[list[Unit]]:
        both = torch.stack((keys, values), dim=2)
        return [[Unit("raw", head, keys.shape[2]) for head in layer] for layer in both]

    def unpack(self, unit: Unit, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return payload[0], payload[1]


class ColdTier:
    """Owns the units, in the host memory that the link copies to and from. Sizes are bytes of the payloads really
    held."""

    def __init__(self, host: HostMemory | None = None) -> None:
        self.host: HostMemory = host or Pageable()
        self._units: dict[tuple[int, int, int], Unit] = {}
        self._pool: torch.Tensor | None = None
        self._page_of: dict[int, int] = {}
        self.bytes = 0

    def reserve(self, shape: KVShape, pages: int, tokens: int, dtype: torch.dtype) -> None:
        """One pool (n_page, n_kv, 2, p, d) per layer for spans of `tokens` tokens (FreeKV's HND layout, sec. 4.1): a
        (page, KV head) is one contiguous stretch, so a recall is one copy."""
        self._pool = self.host.take((shape.layers, pages, shape.kv_heads, 2, tokens, shape.head_dim), dtype)

    def room(self, layer: int, span: int, kv_head: int, like: torch.Tensor) -> torch.Tensor:
        """Host memory for a payload shaped as `like`: a place in the pool where there is one that fits, else memory of
        its own."""
        if self._pool is None or like.shape != self._pool.shape[3:]:
            return self.host.take(like.shape, like.dtype)
        page = self._page_of.setdefault(span, len(self._page_of))
        return self._pool[layer, page, kv_head]

    def expect(self, size: int) -> None:
        """So many bytes are about to be put here, beside the pool."""
        if self._pool is None:
            self.host.expect(size)

    def put(self, layer: int, span: int, kv_head: int, unit: Unit) -> None:
        self._units[layer, span, kv_head] = unit
        self.bytes += unit.bytes

    def get(self, layer: int, span: int, kv_head: int) -> Unit:
        return self._units[layer, span, kv_head]

    def has(self, layer: int, span: int, kv_head: int) -> bool:
        return (layer, span, kv_head) in self._units

    def units(self) -> Iterable[tuple[tuple[int, int, int], Unit]]:
        """((layer, span, KV head), unit) of everything that lies here."""
        return self._units.items()
