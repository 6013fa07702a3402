"""Pages of tokens in the cold tier, and on the device an entry for each cluster of their keys: mean key, mean value and
number of tokens. Clusters lie within a page and differ by layer and KV head.

A method of this kind says which tokens are read and which entries (`select`). Shapes: l layers that are not dense, H_kv
KV heads, p tokens a page, E clusters there is room for, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_pages import ColdPages
from kvlens.methods.families.cold_plan import Plan, smallest_plan
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.refusal import Refusal
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement

MOST_CLUSTERS = 2**15
"""that a label, int16, tells apart"""
LABEL_BYTES, SIZE_BYTES, USE_BYTES = 2, 4, 8
"""of a token's cluster, int16; of a cluster's tokens, int32, and of the step that read it last, int64"""


class ClusterEntries(ColdPages):
    """Base; `params` is a ColdPagesParameters with `clusters`, those of a page, and `rounds` of k-means."""

    family = "token_retrieval"

    def __init__(self, params: Any, context: RunContext) -> None:
        super().__init__(params, context)
        plan = smallest_plan(params, context.shape, context.prompt_tokens, context.max_new, self.unit(params))
        clusters = 0 if plan is None else plan.pages * params.clusters
        if clusters > MOST_CLUSTERS:
            raise Refusal(
                f"{self.name}: the run has {clusters:,} clusters, {MOST_CLUSTERS:,} at most. Raise cluster.",
                code="too_many_clusters",
                clusters=clusters,
                most=MOST_CLUSTERS,
            )

    # ----------------------------------------------------------------------------------------------------- the index
    @classmethod
    def unit(cls, params: Any) -> int:
        return 1

    @classmethod
    def index_bytes(cls, params: Any, shape: KVShape) -> int:
        of_cluster = shape.head_dim * shape.itemsize + SIZE_BYTES + USE_BYTES
        return shape.kv_heads * (params.page * LABEL_BYTES + params.clusters * of_cluster)

    @classmethod
    def _layout(cls, params: Any, shape: KVShape, plan: Plan) -> Layout:
        layout, entries = super()._layout(params, shape, plan), plan.pages * params.clusters
        assert isinstance(layout.zones, tuple)
        zones = tuple(
            zone if layer in layout.dense or isinstance(zone, tuple) else replace(zone, coarse=entries)
            for layer, zone in enumerate(layout.zones)
        )
        return replace(layout, zones=zones, weighted=True)

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        context, p, shape = self.context, self.params, self.context.shape
        size, device = (shape.layers - p.dense_layers, shape.kv_heads), context.device
        entries = plan.pages * p.clusters
        self._labels = torch.zeros(*size, plan.pages * p.page, dtype=torch.int16, device=device)
        self._centroids = torch.zeros(*size, entries, shape.head_dim, dtype=context.dtype, device=device)
        self._sizes = torch.zeros(*size, entries, dtype=torch.int32, device=device)
        self._used = torch.full((*size, entries), -1, dtype=torch.long, device=device)
        """the step in which a cluster on the device was last read token by token; -1: it is not on the device"""
        self._step = 0
        self._none = torch.full((shape.kv_heads, 0), -1, dtype=torch.long, device=device)

    def enter(self, keys: torch.Tensor, first_page: int) -> None:
        import torch

        from kvlens.kernels.group_sums import sum_by_group
        from kvlens.methods.families.kmeans import kmeans

        p, count = self.params, keys.shape[2] // self.params.page
        if not count:
            return
        tokens, entries = (slice(first_page * n, (first_page + count) * n) for n in (p.page, p.clusters))
        offset = torch.arange(count, device=keys.device).repeat_interleave(p.page) * p.clusters
        for layer, of_layer in enumerate(keys.float()):
            centred = of_layer - of_layer.mean(1, keepdim=True)
            segments = centred.unflatten(1, (count, p.page)).flatten(0, 1)
            _, labels = kmeans(segments, p.clusters, p.rounds, self.context.seed, cosine=True)
            label = labels.unflatten(0, (-1, count)).flatten(1) + offset
            sizes = sum_by_group(torch.ones_like(of_layer[..., 0]), label, count * p.clusters)
            means = sum_by_group(of_layer, label, count * p.clusters) / sizes.clamp(min=1)[..., None]
            self._labels[layer, :, tokens] = (label + entries.start).to(torch.int16)
            self._sizes[layer, :, entries] = sizes.int()
            self._centroids[layer, :, entries] = means.to(self._centroids.dtype)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        if self._plan is None:
            return {}
        return {"wave index": (self._labels, self._centroids, self._sizes, self._used, self._filled)}

    # ------------------------------------------------------------------------------------------------------- entries
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        layout, placement = super().prefill_end(prompt)
        if self._plan is not None and self._pages:
            start = self._plan.sinks
            self._summarise(placement, prompt.values[:, :, start : start + self._pages * self.params.page], 0)
        return layout, placement

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        self._step = end.step + 1
        first_page, leave = self._pages, super().decode_end(end, memory)
        if leave is not None:
            self._summarise(leave.placement, memory.read_window(leave.start, leave.end)[1], first_page)
        return leave

    def _summarise(self, placement: Placement, values: torch.Tensor, first_page: int) -> None:
        """Add the entries of the segments from `first_page` on, the offloaded spans: values [L, H_kv, m p, D]."""
        import torch
        import torch.nn.functional as F

        from kvlens.kernels.group_sums import sum_by_group

        p, pages = self.params, len(placement.offload)
        tokens, entries = (slice(first_page * n, (first_page + pages) * n) for n in (p.page, p.clusters))
        labels, sizes = self._labels[:, :, tokens].long() - entries.start, self._sizes[:, :, entries]
        sums = [
            sum_by_group(of_layer.float(), label, pages * p.clusters)
            for of_layer, label in zip(values[p.dense_layers :], labels, strict=True)
        ]
        means = torch.stack(sums) / sizes.clamp(min=1)[..., None]
        dense = p.dense_layers
        placement.coarse = list(placement.offload)
        placement.coarse_keys = F.pad(self._centroids[:, :, entries], (0, 0, 0, 0, 0, 0, dense, 0))
        placement.coarse_values = F.pad(means.to(values.dtype), (0, 0, 0, 0, 0, 0, dense, 0))
        placement.coarse_counts = F.pad(sizes.long(), (0, 0, 0, 0, dense, 0))
        spans = torch.tensor(placement.offload, device=values.device).repeat_interleave(p.clusters)
        placement.coarse_spans = spans.expand(placement.coarse_counts.shape)
        for span in placement.offload:
            placement.states[span] = "coarse"
