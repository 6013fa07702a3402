"""The cold tier as a static step reads it: one pool of rows per layer, so that what a step misses is addressed by numbers on the device.

A row is P tokens of all KV heads, in the layout of kernels/page_moves.py: a page where all spans are pages of P tokens, else one token.
Rows follow the positions, so a span's first row follows from where it starts.
"""

from __future__ import annotations

import torch

from kvlens.memory import Memory
from kvlens.memory.cold import ColdTier
from kvlens.static import cuda


class HostRows(ColdTier):
    """A cold tier whose raw units are views of pool [l, rows, H_kv, 2, P, D]: l layers that offload, pinned where the device is CUDA."""

    def __init__(self, memory: Memory, last: int) -> None:
        """Takes over the units that lie in `memory`'s cold tier now. last: no token will ever lie at this position or after it.

        Raises ValueError when a unit does not lie raw.
        """
        super().__init__()
        before, shape, layout = memory.cold, memory.shape, memory.layout
        self._starts = memory.spans.rows
        self.page = layout.cold_page_tokens if layout.cold_pages else 1
        layers = [layer for pool in memory.hot.pools if not pool.dense for layer in pool.layers]
        self._at = {layer: at for at, layer in enumerate(layers)}
        units = list(before.units())
        self.origin = min([self._starts[span].tok_start for (_, span, _), _ in units], default=memory.window_start)
        rows = max(1, -(-(last - self.origin) // self.page)) if units or any(layout.of(layer).recall for layer in layers) else 0
        pool = torch.empty(len(layers), rows, shape.kv_heads, 2, self.page, shape.head_dim, dtype=memory.dtype)
        self.pool = cuda.pinned(pool) if memory.device.type == "cuda" else pool
        for (layer, span, head), unit in units:
            if unit.form != "raw":
                raise ValueError("a static step recalls spans that lie raw in host memory, not as factors: set form=raw.")
            source, unit.payload = unit.payload, self.room(layer, span, head, unit.payload)
            unit.payload.copy_(source)
            self.put(layer, span, head, unit)

    def room(self, layer: int, span: int, kv_head: int, like: torch.Tensor) -> torch.Tensor:
        """The rows of a span for one KV head, as a raw payload [2, m, D]."""
        first = self._starts[span].tok_start - self.origin
        assert like.dim() == 3, "a static step recalls spans that lie raw"
        assert first % self.page == 0
        count = like.shape[1] // self.page
        assert count * self.page == like.shape[1]
        assert self.page == 1 or count == 1, "where spans are pages, every span is one page"
        rows = self.pool[self._at[layer], first // self.page : first // self.page + count, kv_head]
        return rows[0] if self.page > 1 else rows[:, :, 0].transpose(0, 1)

    def layer(self, layer: int) -> torch.Tensor:
        """[rows, H_kv, 2, P, D]."""
        return self.pool[self._at[layer]]
