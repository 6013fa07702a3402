"""The cold tier as a static step reads it: one pool of rows per layer, so that what a step misses is addressed by
numbers on the device.

A row is P tokens of all KV heads, in the layout of kernels/page_moves.py: a page where all spans are pages of P tokens,
else one token. Rows follow the positions, so a span's first row follows from where it starts.
"""

from __future__ import annotations

from functools import partial

import torch

from kvlens.gpu.static.factors import FactorRows, Host
from kvlens.memory.cold import ColdTier, Unit
from kvlens.memory.pinned import pools
from kvlens.memory.tiers import Memory
from kvlens.methods.base import FactorForm

COLD = ("cold", "coarse")
"""states in which spans that go to host memory are born"""


class HostRows(ColdTier):
    """A cold tier whose raw units are views of a pool [rows, H_kv, 2, P, D] per layer that offloads, pinned where the
    device is CUDA. Spans that lie as factors are in `factors`."""

    def __init__(self, memory: Memory, last: int, form: FactorForm | None = None, host: Host | None = None) -> None:
        """Takes over the units that lie in `memory`'s cold tier now, and gives back the host memory that they lay in.
        last: no token will ever lie at this position or after it; form: of units that are not raw; host: gives host
        memory instead of the link's.

        Raises Shortage where there is not enough to pin: both memories are held until the units have been copied.
        """
        left, link = memory.link.host, memory.link
        super().__init__(left.another())
        link.host = self.host  # which the link gives back when it is closed
        try:
            self._take_over(memory, last, form, host or partial(pools, self.host))
        finally:
            left.close()

    def _take_over(self, memory: Memory, last: int, form: FactorForm | None, host: Host) -> None:
        before, shape, layout = memory.cold, memory.shape, memory.layout
        self._starts = memory.spans.rows
        self.page = layout.cold_page_tokens if layout.cold_pages else 1
        layers = [layer for pool in memory.hot.pools if not pool.dense for layer in pool.layers]
        self._at = {layer: at for at, layer in enumerate(layers)}
        units = list(before.units())
        raw = {span for (_, span, _), unit in units if unit.form == "raw"}
        if form is None:
            raw |= {row.span for row in self._starts if row.state in COLD}
        self.origin = min([self._starts[span].tok_start for span in raw], default=memory.window_start)
        recalls = any(layout.of(layer).recall for layer in layers)
        rows = max(1, -(-(last - self.origin) // self.page)) if units or recalls else 0
        self.pools = host(len(layers), (rows, shape.kv_heads, 2, self.page, shape.head_dim), memory.dtype)
        self.factors: FactorRows | None = None
        if form is not None and recalls:
            sizes = [0] * len(layers)
            for (layer, _, _), unit in units:
                sizes[self._at[layer]] += unit.payload.numel() if unit.form != "raw" else 0
            self.factors = FactorRows(memory, form, len(layers), max(sizes, default=0), host)
        for (layer, span, head), unit in units:
            source, unit.payload = unit.payload, self.room(layer, span, head, unit.payload)
            unit.payload.copy_(source)
            self.put(layer, span, head, unit)
        self.publish()

    def room(self, layer: int, span: int, kv_head: int, like: torch.Tensor) -> torch.Tensor:
        """Where a unit for one KV head lies: the rows of its span [2, m, D], or as many numbers as its factors have."""
        if like.dim() == 1:
            assert self.factors is not None
            return self.factors.room(self._at[layer], like.numel())
        first = self._starts[span].tok_start - self.origin
        assert first >= 0
        assert first % self.page == 0
        count = like.shape[1] // self.page
        assert count * self.page == like.shape[1]
        assert self.page == 1 or count == 1, "where spans are pages, every span is one page"
        rows = self.layer(layer)[first // self.page : first // self.page + count, kv_head]
        return rows[0] if self.page > 1 else rows[:, :, 0].transpose(0, 1)

    def put(self, layer: int, span: int, kv_head: int, unit: Unit) -> None:
        super().put(layer, span, kv_head, unit)
        if unit.form != "raw":
            assert self.factors is not None
            self.factors.name(self._at[layer], span, kv_head, unit)

    def publish(self) -> None:
        """What was put here since the last call can be recalled by the next step."""
        if self.factors is not None:
            self.factors.publish()

    def at(self, layer: int) -> int:
        """Which of the layers that offload this is."""
        return self._at[layer]

    def layer(self, layer: int) -> torch.Tensor:
        """[rows, H_kv, 2, P, D]."""
        return self.pools[self._at[layer]]
