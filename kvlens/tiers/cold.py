"""The cold tier: one pool of rows per layer that offloads, and tables that name the place of each unit.

Tokens that lie as they are fill rows of P tokens of all KV heads [R, H_kv, 2, P, D] (keys, values), in the layout of
the static step's page moves: a page where the layout says so, else one token. Rows follow the positions, so a span's
first row follows from where it starts. What a codec made of a span lies in a flat pool of numbers beside them, packed
one unit after the other; a table [l, H_kv, S, 4] says where each unit begins. Shapes: l layers that offload, S span
ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvlens.link.codec import Codec, Cut, Packed, RawCodec
from kvlens.link.copies import Move
from kvlens.link.host_memory import HostMemory, Pageable, pools
from kvlens.link.transfers import Entry
from kvlens.rows import SpanHeadRow
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout
from kvlens.tiers.slots import SpanTable

Pools = Callable[[int, tuple[int, ...], torch.dtype], Sequence[torch.Tensor]]
"""(layers, size of one layer's pool, dtype) -> a pool in host memory for each layer"""


@dataclass(frozen=True)
class Stored:
    """How units lie that have been given places. size: their bytes, int64 [S, l, H_kv]; form, table, errors: as Packed
    has them, None where all lie raw."""

    size: np.ndarray
    here: np.ndarray
    """bool [S, l, H_kv]: units that lie here; of the others every token stays on the device"""
    form: str = "raw"
    table: torch.Tensor | None = None
    errors: torch.Tensor | None = None

    def rows(self, entry: Entry) -> list[SpanHeadRow]:
        """A row for each line of the units' entry in the log, those that are here: span after span, layer after
        layer."""
        if self.table is None or self.errors is None:
            return [
                SpanHeadRow(s, layer, h, "raw", None, None, size, None, None) for layer, h, s, size in entry.lines()
            ]
        figures = torch.cat((self.table[..., 1:].double(), self.errors.double()), -1).permute(2, 0, 1, 3)
        figures = figures[torch.from_numpy(self.here)]
        return [
            SpanHeadRow(span, layer, head, self.form, int(rank_k), int(rank_v), size, err_k, err_v)
            if tokens
            else SpanHeadRow(span, layer, head, "raw", None, None, size, None, None)
            for (layer, head, span, size), (tokens, rank_k, rank_v, err_k, err_v) in zip(
                entry.lines(), figures.tolist(), strict=True
            )
        ]


class ColdTier:
    """Owns the pools and their tables, in the host memory that the link copies to and from. `bytes`: of the units that
    lie here, whatever else the pools have room for; `version` grows with every span that is put here."""

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        spans: SpanTable,
        dtype: torch.dtype,
        last: int,
        host: HostMemory | None = None,
    ) -> None:
        """last: the run has no token at this position or after it; host: None: ordinary memory."""
        self.host: HostMemory = host or Pageable()
        self.shape, self.dtype, self._spans, self._last = shape, dtype, spans, last
        self.bytes = self.version = 0
        self.origin = 0
        """position that row 0 begins with"""
        self.pools: Sequence[torch.Tensor] = ()
        self.flat: Sequence[torch.Tensor] = ()
        """numbers of packed units, a pool for each layer"""
        self.codec: Codec = RawCodec()
        """of the packed units"""
        self.page = layout.cold_page_tokens if layout.cold_pages else 1
        self.layers = [layer for layer in range(shape.layers) if layer not in layout.dense]
        self.place = {layer: place for place, layer in enumerate(self.layers)}
        """which of the layers that offload each of them is"""
        heads = range(shape.kv_heads)
        self.offloads = np.array([[not layout.dense_at(layer, head) for head in heads] for layer in self.layers])
        """bool [l, H_kv]: KV heads that give tokens away"""
        size = (len(self.layers), shape.kv_heads, spans.capacity)
        self.table = torch.zeros(*size, 4, dtype=torch.long)
        """of packed units: where one begins in its layer's flat pool, tokens, ranks of keys and values"""
        self.size = np.zeros(size, dtype=np.int64)
        """bytes of units, 0: the span does not lie here"""
        self._end = np.zeros(len(self.layers), dtype=np.int64)

    def reserve(self, origin: int, host: Pools | None = None) -> None:
        """Take the rows of all positions from `origin` on, unless they are taken. host: gives them instead of the
        link's memory. Raises Shortage where there is not enough to pin."""
        if not self.pools:
            shape, rows = self.shape, max(1, -(-(self._last - origin) // self.page))
            size = (rows, shape.kv_heads, 2, self.page, shape.head_dim)
            self.origin = origin
            self.pools = (host or partial(pools, self.host))(len(self.layers), size, self.dtype)

    def reserve_packed(self, numbers: int, position: int, host: Pools | None = None) -> None:
        """Take room for `numbers` in every layer and for the tokens from `position` on, unless it is taken: factors of
        m tokens have min(m, D) components at most, so r (m + D + 1) numbers of keys and of values are never more than 4
        D + 2 of a token."""
        if not self.flat:
            later = (self._last - position) * self.shape.kv_heads * (4 * self.shape.head_dim + 2)
            size = (max(1, numbers + max(0, later)),)
            self.flat = (host or partial(pools, self.host))(len(self.layers), size, self.dtype)

    def put(
        self,
        cuts: Sequence[Cut],
        packed: Packed | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int,
        stays: np.ndarray | None = None,
    ) -> tuple[list[Move], Stored]:
        """Give spans their places -> what is to be moved there, and how they lie. keys, values [l, H_kv, m, D] of the
        positions from `first` on; stays bool [l, H_kv, m]: tokens that are to lie here, None: all. KV heads that keep
        every token by the layout have nothing here."""
        ids = [cut.span for cut in cuts]
        tokens = np.array([cut.end - cut.start for cut in cuts])
        raw = np.ones((*self.size.shape[:2], len(cuts)), dtype=bool)
        size = np.broadcast_to(tokens * self.shape.head_token_bytes, raw.shape).copy()
        here = np.broadcast_to(self.offloads[..., None], raw.shape).copy()
        if stays is not None:
            assert packed is None, "part of a span can lie here only as it is"
            assert self.page == 1, "part of a span can lie here only token by token"
            each = [stays[..., cut.start - first : cut.end - first].sum(-1) for cut in cuts]
            size = np.stack(each, -1) * self.shape.head_token_bytes
        moves = []
        if packed is not None:
            raw = packed.size.numpy() == 0
            size = np.where(raw, size, packed.size.numpy() * self.dtype.itemsize)
            assert (raw | here).all(), "a codec packed what stays on the device"
            moves += self._put_packed(ids, packed, max(cut.end for cut in cuts))
        size, raw = np.where(here, size, 0), raw & here
        if raw.any():
            moves += self._put_raw(cuts, tokens, raw, keys, values, first, stays)
        self.size[:, :, ids] = size
        self.bytes += int(size.sum())
        self.version += 1
        by_span = size.transpose(2, 0, 1), here.transpose(2, 0, 1)
        if packed is None:
            return moves, Stored(*by_span)
        return moves, Stored(*by_span, packed.form, packed.table, packed.errors)

    def _put_packed(self, ids: list[int], packed: Packed, end: int) -> list[Move]:
        numbers = np.diff(packed.begin)
        self.reserve_packed(int(numbers.max(initial=0)), end)
        assert (self._end + numbers <= [len(flat) for flat in self.flat]).all(), (
            "a codec made more than 4 D + 2 numbers of a token"
        )
        placed = packed.table.clone()
        placed[..., 0] += torch.from_numpy(self._end)[:, None, None] * (packed.size > 0)
        self.table[:, :, ids] = placed
        moves = [
            Move(flat[end : end + count], packed.numbers[begin : begin + count])
            for flat, end, begin, count in zip(self.flat, self._end, packed.begin, numbers, strict=False)
            if count
        ]
        self._end += numbers
        return moves

    def _put_raw(
        self,
        cuts: Sequence[Cut],
        tokens: np.ndarray,
        raw: np.ndarray,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int,
        kept: np.ndarray | None,
    ) -> list[Move]:
        """A move for each layer, of its units that are raw bool [l, H_kv, S], or of their tokens that are kept bool
        [l, H_kv, m]."""
        shape, page = self.shape, self.page
        self.reserve(min(cut.start for cut in cuts))
        assert all(cut.start >= self.origin for cut in cuts), (
            "spans go to the cold tier in the order of their positions"
        )
        if page > 1:
            assert all((cut.start - self.origin) % page == 0 and cut.end - cut.start == page for cut in cuts), (
                "where spans are pages, every span is one page"
            )
        positions = np.concatenate([np.arange(cut.start, cut.end) for cut in cuts])
        units = ((positions[::page] - self.origin) // page)[:, None] * shape.kv_heads + np.arange(shape.kv_heads)
        stays = np.repeat(raw, tokens // page, axis=2)
        if kept is not None:
            stays = stays & kept[:, :, positions - first]
        stays = stays.transpose(0, 2, 1)
        indices = torch.from_numpy(positions - first).to(keys.device)
        whole = bool(stays.all())
        moves = []
        for layer, pool in enumerate(self.pools):
            raw_tokens = torch.stack((keys[layer].index_select(1, indices), values[layer].index_select(1, indices)), 1)
            rows = raw_tokens.unflatten(2, (-1, page)).permute(2, 0, 1, 3, 4).flatten(2)
            sources = rows.flatten(0, 1)
            number = units.reshape(-1)
            if not whole:
                number = units[stays[layer]]
                sources = sources[torch.from_numpy(np.flatnonzero(stays[layer])).to(keys.device)]
            if len(number):
                moves.append(Move(pool.flatten(0, 1).flatten(1), sources, number))
        return moves

    # ---- what lies where
    def layer(self, layer: int) -> torch.Tensor:
        """The layer's rows [R, H_kv, 2, P, D]."""
        return self.pools[self.place[layer]]

    def packed(self, layer: int, kv_heads: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """Which units [n] a codec packed."""
        is_packed: np.ndarray = self.table[self.place[layer]].numpy()[kv_heads, spans, 1] > 0
        return is_packed

    def keys_at(self, kv_heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [n]: where the keys of tokens lie in a layer's pool seen as [R H_kv 2 P, D]; their values lie P rows
        behind."""
        row, offset = np.divmod(positions - self.origin, self.page)
        offsets: np.ndarray = (row * self.shape.kv_heads + kv_heads) * 2 * self.page + offset
        return offsets

    def unit(self, layer: int, span: int, kv_head: int) -> torch.Tensor:
        """A view of what lies here of one span for one (layer, KV head): [2, m, D] as it is, or its numbers [N]."""
        number, row = self.place[layer], self._spans.rows[span]
        start, packed, *_ = self.table[number, kv_head, span].tolist()
        if packed:
            return self.flat[number][start : start + int(self.size[number, kv_head, span]) // self.dtype.itemsize]
        start_row, end = ((x - self.origin) // self.page for x in (row.tok_start, row.tok_end))
        rows = self.pools[number][start_row:end, kv_head]
        return rows[0] if self.page > 1 else rows[:, :, 0].transpose(0, 1)
