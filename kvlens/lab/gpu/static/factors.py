"""Spans that lie in host memory as gated low-rank factors, reconstructed inside a static step (eq. 8).

Units keep the form that kernels/lowrank.py gives them, ranks and all; a table on the device says where each begins.
What a step misses is found in that table, so shapes depend on the longest span and the largest rank only. On CUDA three
launches: kernels/arrivals.py of the lab lists what came, the kernel of lowrank_spans.py reads the factors in pinned
memory, each number once, and tokens go into their cells. Shapes: H KV heads, S span ids, M cells (tokens) of the zone,
A spans that can arrive at once, T tokens of the longest span, D head size.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import Backend
from kvlens.kernels.compat import MIN_DOT, next_power_of_two
from kvlens.kernels.lowrank import dense_units
from kvlens.lab.gpu.kernels.arrivals import arrivals_torch, arrivals_triton, fill_cells_torch, fill_cells_triton
from kvlens.lab.gpu.static import cuda
from kvlens.memory.memory import Memory
from kvlens.methods.hooks import FactorForm


class FactorRows:
    """The factors of l layers, as the cold tier holds them. meta int64 [l, H, S, 4] on the device: the tier's table,
    where a unit begins in its layer's flat pool, tokens, ranks of keys and values; 0 tokens: the span lies elsewhere.
    `publish` brings what went to the tier since to the device.
    """

    def __init__(self, memory: Memory, form: FactorForm) -> None:
        shape, layout = memory.shape, memory.layout
        shortest, longest = layout.recall_spans or (1, layout.zones_of(0).recall)
        self.cold, self.form, self.head_dim, self.tokens = memory.host.cold, form, shape.head_dim, longest
        self.rank = min(form.max_rank, longest, shape.head_dim)
        self._shortest = max(1, shortest)
        self.meta = self.cold.table.to(memory.device, copy=True)
        self._published = self.cold.version
        self._starts = memory.spans.starts
        self._most = max(layout.zones_of(layer).recall for layer in range(shape.layers)) // self._shortest
        self.kernels: Backend = "torch"
        self._scratch: tuple[torch.Tensor, ...] = ()

    def use(self, kernels: Backend) -> None:
        """Before the first step: who lists, reconstructs and copies what comes. On CUDA k3 reconstructs in any case,
        since PyTorch reads no host memory from there. Takes the room that k3 writes to."""
        self.kernels, self._scratch = kernels, ()
        if kernels == "torch" and not self.meta.is_cuda:
            return
        size = (self._most, self.meta.shape[1], max(MIN_DOT, next_power_of_two(self.tokens)), self.head_dim)
        wide = self.cold.flat[0].dtype if self.form.turn is None else torch.float32
        self._scratch = tuple(torch.zeros(size, dtype=wide, device=self.meta.device) for _ in range(2))

    @property
    def bytes(self) -> int:
        """Device bytes: the table, and room for what arrives in one layer."""
        return sum(x.numel() * x.element_size() for x in (self.meta, *self._scratch))

    def publish(self) -> None:
        if self._published != self.cold.version:
            self.meta.copy_(self.cold.table)
            self._published = self.cold.version

    # ---- in the step
    def tokens_of(self, row: int) -> torch.Tensor:
        """int64 [H, S]: tokens of the spans that lie here, 0 for others."""
        return self.meta[row, :, :, 1]

    def bring(
        self,
        row: int,
        layer: int,
        came: torch.Tensor,
        span: torch.Tensor,
        offset: torch.Tensor,
        fill: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Reconstruct the spans in `came` bool [H, S] and put their tokens into cells -> bytes of their units, int64
        [H]. keys, values [H, M, D]; span, offset int64 [H, M]: what lies in each cell, to be written where `fill` bool
        [H, M]."""
        triton = self.kernels == "triton"
        places = span.shape[1] // self._shortest
        listed = (arrivals_triton if triton else arrivals_torch)(
            came, self.meta[row], places, self.head_dim, self.cold.flat[row].itemsize
        )
        rebuilt = self._rebuild(row, layer, listed.tiles)
        (fill_cells_triton if triton else fill_cells_torch)(rebuilt, listed.turn, span, offset, fill, keys, values)
        return listed.bytes

    def _rebuild(self, row: int, layer: int, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tiles: as `Arrivals` has them -> keys, values [H, A, T, D] as attention uses them; whatever is behind the
        spans' ends."""
        heads, spans, _ = self.meta.shape[1:]
        turn, place = self.form.turn, tiles[:, 0].view(heads, -1)
        keys, values = self._by_kernel(row, tiles) if self._scratch else self._by_torch(row, place)
        if turn is None:
            return keys, values
        start = self._starts.long()[place.clamp(min=0) % spans]
        positions = (start[..., None] + torch.arange(self.tokens, device=start.device)).flatten()
        turned = turn(keys.reshape(1, -1, self.head_dim), positions, layer)
        return turned.view(keys.shape).to(values.dtype), values

    def _by_torch(self, row: int, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """place int64 [H, A]: of each unit in meta[row].view(-1, 4), -1: none."""
        units = self.meta[row].flatten(0, 1)[place.clamp(min=0)].masked_fill(place[..., None] < 0, 0)
        start, n, rank_k, rank_v = units.unbind(-1)
        flat, sizes, wide = self.cold.flat[row], (self.tokens, self.rank, self.head_dim), self.form.turn is not None
        keys = dense_units(flat, start, n, rank_k, sizes, wide)
        return keys, dense_units(flat, start + rank_k * (n + self.head_dim + 1), n, rank_v, sizes)

    def _by_kernel(self, row: int, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by k3: one tile per span, so that its factors cross the bus once."""
        most = len(tiles) // self.meta.shape[1]
        cuda.reconstruct(self.cold.flat[row], self.meta[row], self.rank, tiles, *self._scratch)
        keys, values = (x.transpose(0, 1)[:, :most, : self.tokens] for x in self._scratch)
        return keys, values.to(self.cold.flat[row].dtype)
