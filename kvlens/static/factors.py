"""Spans that lie in host memory as gated low-rank factors, reconstructed inside a static step (SeKV sec. 3.2, eq. 8).

Units keep the form that kernels/lowrank.py gives them, ranks and all; a table on the device says where each begins. What a step misses
is found in that table, so shapes depend on the longest span and the largest rank only. On CUDA the kernel of kernels/lowrank_spans.py
reads the factors in pinned memory, each number once.
Shapes: H KV heads, S span ids, M cells (tokens) of the zone, A spans that can arrive at once, T tokens of the longest span, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvlens.kernels.compat import MIN_DOT, next_power_of_two
from kvlens.kernels.lowrank import reconstruct
from kvlens.memory import Memory
from kvlens.memory.cold import Unit
from kvlens.methods.base import FactorForm
from kvlens.static import cuda

Host = Callable[[int, tuple[int, ...], torch.dtype], Sequence[torch.Tensor]]
"""(layers, size of one layer's pool, dtype) -> a pool in host memory for each layer"""


class FactorRows:
    """The factors of l layers. meta int64 [l, H, S, 4] on the device: where a unit begins in its layer's flat pool, tokens, ranks of keys
    and values; 0 tokens: the span lies elsewhere. `publish` brings what was named since to the device.
    """

    def __init__(self, memory: Memory, form: FactorForm, layers: int, units: int, host: Host) -> None:
        """units: numbers in the units of one layer that lie in the cold tier now."""
        shape, layout, spans = memory.shape, memory.layout, memory.spans
        shortest, longest = layout.recall_spans or (1, layout.of(0).recall)
        self.form, self.head_dim, self.tokens = form, shape.head_dim, longest
        self.rank = min(form.max_rank, longest, shape.head_dim)
        self._shortest = max(1, shortest)
        later = (spans.capacity - len(spans)) * shape.kv_heads * (layout.staging_bytes // shape.itemsize)
        self.flat = host(layers, (max(1, units + later),), memory.dtype)
        self._named = torch.zeros(layers, shape.kv_heads, spans.capacity, 4, dtype=torch.long)
        self.meta = self._named.to(memory.device)
        self._end = [0] * layers
        self._stale = False
        self._starts = memory.spans.starts
        self._scratch: tuple[torch.Tensor, ...] = ()
        self._most = max(layout.of(layer).recall for layer in range(shape.layers)) // self._shortest
        if memory.device.type == "cuda":
            self.reserve()

    def reserve(self) -> None:
        """Take the room on the device that the kernel writes to."""
        size = (self._most, self.meta.shape[1], max(MIN_DOT, next_power_of_two(self.tokens)), self.head_dim)
        wide = self.flat[0].dtype if self.form.turn is None else torch.float32
        self._scratch = tuple(torch.zeros(size, dtype=wide, device=self.meta.device) for _ in range(2))

    @property
    def bytes(self) -> int:
        """Device bytes: the table, and room for what arrives in one layer."""
        return sum(x.numel() * x.element_size() for x in (self.meta, *self._scratch))

    def room(self, at: int, size: int) -> torch.Tensor:
        """The next `size` numbers of a layer's pool."""
        start = self._end[at]
        assert start + size <= len(self.flat[at]), "a unit is larger than the layout's staging buffer"
        self._end[at] += size
        return self.flat[at][start : start + size]

    def name(self, at: int, span: int, kv_head: int, unit: Unit) -> None:
        """A unit whose payload `room` gave."""
        assert unit.rank_k is not None
        assert unit.rank_v is not None
        assert max(unit.rank_k, unit.rank_v) <= self.rank
        start = unit.payload.storage_offset() - self.flat[at].storage_offset()
        self._named[at, kv_head, span] = torch.tensor((start, unit.tokens, unit.rank_k, unit.rank_v))
        self._stale = True

    def fill(self, at: int, named: torch.Tensor) -> None:
        """Name units that lie in a layer's pool already: named [H, S, 4] as `meta`."""
        self._named[at] = named
        self._stale = True

    def publish(self) -> None:
        if self._stale:
            self.meta.copy_(self._named)
            self._stale = False

    # --------------------------------------------------------------------------------------------------------------- in the step
    def tokens_of(self, at: int) -> torch.Tensor:
        """int64 [H, S]: tokens of the spans that lie here, 0 for others."""
        return self.meta[at, :, :, 1]

    def sizes(self, at: int) -> torch.Tensor:
        """Numbers in each span's unit, int64 [H, S]."""
        _, tokens, rank_k, rank_v = self.meta[at].unbind(-1)
        return (rank_k + rank_v) * (tokens + self.head_dim + 1)

    def bring(self, at: int, layer: int, came: torch.Tensor, span: torch.Tensor, offset: torch.Tensor, fill: torch.Tensor,
              keys: torch.Tensor, values: torch.Tensor) -> None:  # fmt: skip
        """Reconstruct the spans in `came` bool [H, S] and put their tokens into cells. keys, values [H, M, D]; span, offset int64 [H, M]:
        what lies in each cell, to be written where `fill` bool [H, M]."""
        heads, spans = came.shape
        most = span.shape[1] // self._shortest
        turn = came.cumsum(1) - 1
        ids = torch.arange(spans, device=came.device).expand(heads, spans)
        arrived = torch.full((heads, most + 1), -1, dtype=torch.long, device=came.device)
        arrived = arrived.scatter(1, torch.where(came, turn, most), torch.where(came, ids, -1))[:, :most]
        rebuilt = self._rebuild(at, layer, arrived)
        source = torch.where(fill, turn.gather(1, span) * self.tokens + offset, 0)[..., None].expand(-1, -1, self.head_dim)
        for target, new in zip((keys, values), rebuilt, strict=True):
            target.copy_(torch.where(fill[..., None], new.flatten(1, 2).gather(1, source), target))

    def _rebuild(self, at: int, layer: int, arrived: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """arrived int64 [H, A], -1: none -> keys, values [H, A, T, D] as attention uses them; whatever is behind the spans' ends."""
        turn = self.form.turn
        if self.meta.is_cuda:
            keys, values = self._by_kernel(at, arrived)
        else:
            found = self.meta[at].gather(1, arrived.clamp(min=0)[..., None].expand(-1, -1, 4)).masked_fill(arrived[..., None] < 0, 0)
            start, n, rank_k, rank_v = found.unbind(-1)
            keys = self._dense(at, start, n, rank_k, wide=turn is not None)
            values = self._dense(at, start + rank_k * (n + self.head_dim + 1), n, rank_v)
        if turn is None:
            return keys, values
        first = self._starts.long()[arrived.clamp(min=0)]
        positions = (first[..., None] + torch.arange(self.tokens, device=first.device)).flatten()
        turned = turn(keys.reshape(1, -1, self.head_dim), positions, layer)
        return turned.view(keys.shape).to(values.dtype), values

    def _dense(self, at: int, start: torch.Tensor, n: torch.Tensor, rank: torch.Tensor, wide: bool = False) -> torch.Tensor:
        """[U (n, r) | g (r) | V (r, D)] at `start` [H, A] of a layer's pool -> [H, A, T, D]; ranks padded with zeros to the largest."""
        flat, device = self.flat[at], start.device
        start, n, rank = (x[..., None, None] for x in (start, n, rank))
        t, r, d = (torch.arange(size, device=device) for size in (self.tokens, self.rank, self.head_dim))
        there = r < rank

        def read(address: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            found = torch.where(mask, flat[torch.where(mask, address, 0)], 0)
            return found.float() if wide else found

        u = read(start + t[:, None] * rank + r, there & (t[:, None] < n))
        g = read(start + n * rank + r, there)[..., 0, :]
        v = read(start + (n + 1) * rank + r[:, None] * self.head_dim + d, there.transpose(-1, -2))
        return reconstruct(u, g, v)

    def _by_kernel(self, at: int, arrived: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on CUDA: one tile per span, so that its factors cross the bus once."""
        heads, most = arrived.shape
        head = torch.arange(heads, device=arrived.device)[:, None]
        place = torch.where(arrived < 0, -1, head * self.meta.shape[2] + arrived)
        slot = torch.arange(most, device=arrived.device).expand(heads, most)
        tiles = torch.stack((place, torch.zeros_like(place), slot), -1).flatten(0, 1)
        kept_keys, kept_values = self._scratch
        cuda.reconstruct(self.flat[at], self.meta[at], self.rank, tiles, kept_keys, kept_values)
        keys, values = (x.transpose(0, 1)[:, :most, : self.tokens] for x in self._scratch)
        return keys, values.to(self.flat[at].dtype)
