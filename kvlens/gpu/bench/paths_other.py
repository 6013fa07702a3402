"""Attention paths that are not k2, k5, k4, k1 in a row: SeKV's two resolutions, recall led by the host, and a full
cache over the bus."""

from __future__ import annotations

import torch

from kvlens.gpu.bench import calls
from kvlens.gpu.bench.floors import PAGE, RANK, ROUTE, SPAN, StepShape
from kvlens.gpu.bench.part import Bench
from kvlens.gpu.bench.paths import Path, Short, Zoned, by_layer
from kvlens.kernels.lowrank_spans import Spans, attend
from kvlens.kernels.merge import merge
from kvlens.kernels.page_attend import Pages, page_attention
from kvlens.kernels.page_scores import page_scores


class SeKV(Zoned):
    """Routing by small summaries, topk, zone plan, k4 (a zoom waits for its factors), k1 over anchors, window and
    coarse entries with their bias, k3 over the zoomed spans' factors, one merge. A unit of factors (rank 16, 64 tokens)
    rides in a page's 16 KiB."""

    note = "factors of 12 KiB move as units of 16 KiB"

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int) -> None:
        Path.__init__(self, bench, shape, context, batch)
        kv, at, normal = self.kv, bench.device.at, bench.device.normal
        spans, exact = shape.routed, shape.held - shape.wanted
        bare = self.table(exact, exact)
        rows = torch.full(bare.table.shape, -1, dtype=torch.int32, device=at)
        rows[..., : -(-spans // PAGE)] = 0
        self.pages = Pages(bare.table, bare.page_len, bare.n_page, torch.full((1, 1, PAGE), 4.0, device=at), rows)
        self.exact = [(self.slots(batch * exact), self.slots(batch * exact)) for _ in range(kv.layers)]
        self.router = [normal(kv.q_heads, ROUTE, kv.head_dim, scale=kv.head_dim**-0.5) for _ in range(kv.layers)]
        self.summaries = [normal(batch, kv.q_heads, spans, ROUTE) for _ in range(kv.layers)]
        factors = [normal(batch * shape.wanted, kv.kv_heads, 2, PAGE, kv.head_dim) for _ in range(kv.layers)]
        self.layers = [(f[:, :, 0], f[:, :, 1]) for f in factors]
        self._replay(spans, False, shape.wanted)
        meta = torch.tensor((0, SPAN, RANK, RANK)).repeat(batch, kv.kv_heads, shape.wanted, 1)
        slot = self.slot.view(batch, kv.kv_heads, -1).cpu().long()
        meta[..., 0] = (slot * kv.kv_heads + torch.arange(kv.kv_heads)[:, None]) * (2 * PAGE * kv.head_dim)
        self.spans = [Spans(f.view(-1), meta.to(at), RANK) for f in factors]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        scaling = self.kv.head_dim**-0.5
        routed = torch.einsum("bhd,hrd->bhr", q, self.router[layer])
        scores = (self.summaries[layer] @ routed[..., None])[..., 0]
        scores.unflatten(1, (self.kv.kv_heads, -1)).amax(2).topk(self.shape.wanted, dim=-1)
        if self.moves:
            self.recall(layer, self.now[layer])
        base = page_attention(q, *self.exact[layer], self.pages, scaling, mass=False)
        parts, lses = attend(q, self.spans[layer], None, scaling)
        together = torch.cat((base.output[:, :, None].float(), parts), 2), torch.cat((base.lse[..., None], lses), 2)
        return merge(*together, q.dtype)[0]


class HostRecall(Path):
    """Blocking recall as ArkVale does it: every layer the host reads which pages are wanted, copies whole pages over
    all heads, one call each, and attention waits. It cannot be captured."""

    graph = False
    note = "indices read by the host, one copy per page, launched one by one"

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int) -> None:
        super().__init__(bench, shape, context, batch)
        kv, at, places = self.kv, bench.device.at, context // PAGE
        self.pages = self.table(shape.pages, shape.held)
        size = (batch * shape.held, 2, PAGE, kv.kv_heads, kv.head_dim)
        self.storage = [bench.device.normal(*size) for _ in range(kv.layers)]
        self.bounds = [
            tuple(bench.device.normal(batch, kv.kv_heads, places, kv.head_dim) for _ in range(2))
            for _ in range(kv.layers)
        ]
        self.live = torch.full((batch, kv.kv_heads), places, dtype=torch.int32, device=at)
        self.pools = [
            pool.view(-1, 2, PAGE, kv.kv_heads, kv.head_dim) for pool in by_layer(bench, batch * places, PAGE)
        ]
        self.order = [torch.randperm(places).tolist() for _ in range(batch)]
        self.step = 0

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        scores = page_scores(q, *self.bounds[layer], self.live, "MeanS", 1.0).mean(1)
        scores.topk(self.shape.wanted, dim=-1).indices.tolist()  # the host waits here, as it has to
        if self.moves:
            self._recall(layer)
        keys, values = (self.storage[layer][:, i].transpose(1, 2) for i in range(2))
        return calls.k1(q, keys, values, self.pages)

    def _recall(self, layer: int) -> None:
        """The pages that this step's window over the order has and the last one's had not, into the slots of those that
        left."""
        shape, places = self.shape, self.context // PAGE
        for b, order in enumerate(self.order):
            for i in range(self.step * shape.missed, (self.step + 1) * shape.missed):
                slot = b * shape.held + (shape.held - shape.wanted) + i % shape.wanted
                self.storage[layer][slot].copy_(self.pools[layer][b * places + order[i % places]], non_blocking=True)

    def end(self) -> None:
        self.step += 1

    def recall_alone(self) -> None:
        for layer in range(self.kv.layers):
            self._recall(layer)
        self.end()


class FullOffload(Path):
    """FullKV kept in host memory: each layer's keys and values are copied whole, a layer ahead of their use, into two
    buffers."""

    note = "ours; transformers' offloaded cache is among the whole steps"

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int) -> None:
        super().__init__(bench, shape, context, batch)
        kv, pages = self.kv, batch * (context // PAGE)
        self.pages = self.table(shape.pages, shape.pages)
        self.buffers = [bench.device.normal(pages, kv.kv_heads, 2, PAGE, kv.head_dim) for _ in range(2)]
        self.pools = by_layer(bench, pages, PAGE)

    def _fetch(self, layer: int) -> None:
        self.buffers[layer % 2].copy_(self.pools[layer], non_blocking=True)

    def begin(self) -> None:
        if self.moves:
            self.bench.device.aside(lambda: self._fetch(0))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.bench.device.join()
            if layer + 1 < self.kv.layers:
                self.bench.device.aside(lambda: self._fetch(layer + 1))
        buffer = self.buffers[layer % 2]
        return calls.k1(q, buffer[:, :, 0], buffer[:, :, 1], self.pages)

    def recall_alone(self) -> None:
        for layer in range(self.kv.layers):
            self._fetch(layer)


class Chess(Short):
    """k1 over the selected pages of a whole context; a selection is one product with all page vectors of all layers,
    and topk."""

    def selection(self) -> object:
        """One selection, on page vectors over all layers and KV heads [B, pages, L * H_kv * D]."""
        if not hasattr(self, "vectors"):
            kv, pages = self.kv, self.context // PAGE
            wide = kv.layers * kv.kv_heads * kv.head_dim
            self.vectors = self.bench.device.normal(self.batch, pages, wide, scale=wide**-0.5)
            self.anchor = self.bench.device.normal(self.batch, wide, 1)
        return (self.vectors @ self.anchor)[..., 0].topk(self.shape.pages, dim=-1)
