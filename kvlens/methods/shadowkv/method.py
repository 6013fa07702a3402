"""ShadowKV: keys of low rank on the device, values in host memory, chunks chosen by their mean key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.families.cold_pages import best
from kvlens.methods.run_inputs import Prefilled, RunContext
from kvlens.methods.segmenter import PromptFacts, Segmenter
from kvlens.methods.shadowkv.params import Plan, ShadowKVParameters
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


class ShadowKV(Method):
    """When the prompt has been read, the keys of a layer, without their positions and all KV heads side by side, are
    decomposed once: the device holds the factors, host memory the values. Chunks are ranked by their mean key: softmax
    over chunks of q . mean / sqrt(D) per query head, the largest of a group; of the best ones the values are fetched
    and the keys rebuilt and turned. Whole on the device stay, per KV head, the chunks in which some key is least like
    the mean (outliers), and the newest chunks and all decoded tokens (paper sec. 4, Algorithms 1 and 2).

    Departures: the rank is a share of the keys' width, since 160 saves nothing where keys are narrow; only chunks that
    leave the device are decomposed; scores are divided by the root of the model's own head size.
    """

    name = "shadowkv"
    title = "ShadowKV"
    paper = "Sun et al., ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference, ICML 2025"
    summary = (
        "keeps low-rank keys, the mean key of every chunk and unusual chunks on the device, the values in host memory; "
        "fetches the values of the best chunks and rebuilds their keys"
    )
    family = "span_retrieval"
    Parameters = ShadowKVParameters
    presets = {  # noqa: RUF012
        "paper": {"tokens": 2048},
        "demo": {"chunk": 16, "local": 1, "outliers": 1, "rank": 0.125},
    }
    segmenters = (Segmenter("chunks (ShadowKV)", ("chunk", "local")),)
    journal_names = {  # noqa: RUF012
        "key_error": "relative Frobenius error of a layer's rebuilt keys, per KV head",
        "outliers": "chunks that a KV head of a layer keeps whole",
    }
    params: ShadowKVParameters

    def __init__(self, params: ShadowKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._turn = context.rotary(self.name)
        self._recall: int | None = None
        """chunks chosen; None: all tokens stay on the device"""

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return Plan(params, shape, prompt_tokens, max_new).floor()

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        plan = Plan(params, prompt.shape, prompt.prompt_tokens, prompt.max_new)
        return fixed_chunks(0, plan.window_from, params.chunk, kind="chunk")

    # ----------------------------------------------------------------------------------------------------- the prompt
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement
        from kvlens.methods.shadowkv.codec import ValueCodec

        context, p = self.context, self.params
        plan = Plan(p, context.shape, context.prompt_tokens, context.max_new)
        self.refuse_below(plan.floor())
        self._recall = plan.within(context.budget_bytes)
        spans = self.segments(p, context, ())
        if self._recall is None:
            placement = Kept.everywhere(torch.arange(plan.window_from, device=context.device))
            resident = ["resident"] * len(spans)
            return plan.whole(), Placement(spans, resident, resident, placement)
        self._allocate(plan, prompt)
        placement = Kept.masked(self._outlier.repeat_interleave(p.chunk, -1))
        return plan.layout(self._recall), Placement(
            spans,
            ["cold"] * len(spans),
            ["anchor"] * len(spans),
            placement,
            offload=list(range(len(spans))),
            codec=ValueCodec(self._tokens, self._basis, self._turn),
        )

    def _allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        from kvlens.methods.shadowkv.codec import ValueCodec, decompose

        shape, dtype, device = self.context.shape, self.context.dtype, self.context.device
        heads, m = (shape.layers, shape.kv_heads), plan.window_from
        self._tokens = torch.zeros(shape.layers, m, plan.rank, dtype=dtype, device=device)
        self._basis = torch.zeros(shape.layers, plan.rank, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
        self._means = torch.zeros(*heads, plan.chunks, shape.head_dim, dtype=dtype, device=device)
        self._outlier = torch.zeros(*heads, plan.chunks, dtype=torch.bool, device=device)
        positions = torch.arange(m, device=device)
        codec = ValueCodec(self._tokens, self._basis, self._turn)
        for layer in range(shape.layers):
            keys = prompt.keys[layer, :, :m].float()
            plain = self._turn(keys, positions, layer, back=True)
            self._tokens[layer], self._basis[layer] = decompose(plain, plan.rank)
            chunks = keys.unflatten(1, (plan.chunks, -1))
            self._means[layer] = mean = chunks.mean(2)
            likeness = torch.cosine_similarity(chunks, mean[:, :, None], dim=-1).amin(-1)
            odd = likeness.argsort(dim=-1, stable=True)[:, : plan.outliers]
            self._outlier[layer] = self._outlier[layer].scatter(1, odd, True)
            of_heads = torch.arange(shape.kv_heads, device=device)
            off = codec.rebuilt(layer, of_heads, positions.expand(shape.kv_heads, -1)) - keys
            self.note("key_error", off.norm(dim=(1, 2)) / keys.norm(dim=(1, 2)), layer)
            for head in range(shape.kv_heads):
                self.note("outliers", odd[head].sort().values.float(), layer, head)

    # ------------------------------------------------------------------------------------------------------ decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Selection

        if self._recall is None:
            return None
        shape, means, outlier = self.context.shape, self._means[layer], self._outlier[layer]
        scores = q.float().unflatten(0, (shape.kv_heads, -1)) @ means.float().transpose(-1, -2) * shape.head_dim**-0.5
        shares = scores.masked_fill(outlier[:, None], float("-inf")).log_softmax(-1)  # logarithms do not underflow
        pooled = shares.amax(1) if self.params.group == "max" else shares.logsumexp(1) - math.log(shape.group)
        score = pooled.masked_fill(outlier, float("-inf"))
        wishes = best(score, self._recall) + 1  # span ids: the window's is 0
        fine = torch.zeros(shape.kv_heads, means.shape[1] + 1, dtype=torch.bool, device=q.device)
        fine = fine.scatter(1, wishes, True)
        logged = torch.nn.functional.pad(score.exp().masked_fill(outlier, float("nan")), (1, 0), value=float("nan"))
        return Selection(
            fine[:, None].expand(-1, shape.group, -1),
            wishes,
            fits=True,
            score=logged,
            index_bytes=means.shape[1] * means.shape[2] * means.element_size(),
        )

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        if self._recall is None:
            return {}
        return {"key factors": (self._tokens, self._basis), "means": (self._means, self._outlier)}
