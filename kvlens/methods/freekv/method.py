"""FreeKV: pages in host memory, recalled one step ahead by the last query, corrected where the query has turned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.memory.layout import Layout
from kvlens.methods.base import MemoryView, Method, Prefilled, RunContext, StepEnd, WindowLeave
from kvlens.methods.freekv import layout as freekv_layout
from kvlens.methods.freekv.params import PRESETS, FreeKVParameters
from kvlens.methods.segmenter import PromptFacts, Segmenter
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


class FreeKV(Method):
    """Speculative retrieval (sec. 3.2): at step i a KV head attends sinks, window and the pages it selected with the
    query of step i - 1, which were recalled behind that step's back; then it selects with its own query for step i + 1.
    Fine-grained correction (sec. 3.3): a KV head whose queries turned since the last step selects and recalls before
    its attention instead. The first decode step has nothing to speculate on and blocks for all heads.

    Pages that leave the window between two steps are candidates from the next selection on. Departures:
    docs/fidelity.md.
    """

    name = "freekv"
    title = "FreeKV"
    paper = "Liu et al., FreeKV: Boosting KV Cache Retrieval for Efficient LLM Inference"
    summary = (
        "keeps sinks, window and min-max summaries of all pages on the device, recalls the pages the last "
        "step's query asks for in "
        "the background, and waits only for heads whose query has changed"
    )
    segmenters = (Segmenter("pages (FreeKV)", ("page", "sinks", "window")),)
    family = "page_retrieval"
    Parameters = FreeKVParameters
    presets = PRESETS
    static_ready = True
    params: FreeKVParameters

    def __init__(self, params: FreeKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._plan: freekv_layout.Plan | None = None
        self._pages = 0
        """pages that have left the window: rows of the summary table in use; `_filled` is the same number on the
        device"""
        self._speculates = False
        """a step has ended, so there is a last query and a last selection"""

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return freekv_layout.floor_bytes(params, shape, prompt_tokens, max_new)

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        plan = freekv_layout.plan_within(params, prompt.shape, n, prompt.max_new, prompt.budget_bytes)
        sinks = min(params.sinks, n)
        spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are always attended.")] if sinks else []
        return spans + fixed_chunks(sinks, n if plan is None else plan.window_from, params.page, kind="page")

    # ------------------------------------------------------------------------------------------------------------ end
    # of prefill
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.cold import RawCodec
        from kvlens.memory.kept import Kept
        from kvlens.memory.placement import Placement
        from kvlens.methods.freekv.score import summarise

        context, params = self.context, self.params
        n, shape = context.prompt_tokens, context.shape
        self.refuse_below(self.floor_bytes(params, shape, n, context.max_new))
        self._plan = plan = freekv_layout.plan_within(params, shape, n, context.max_new, context.budget_bytes)
        sinks = min(params.sinks, n)
        spans = self.segments(params, context, ())
        roles = ["sink" if span.kind == "sink" else "resident" for span in spans]
        if plan is None:
            kept = Kept.everywhere(torch.arange(n, device=context.device))
            layout = freekv_layout.whole_layout(params, n, context.max_new)
            return layout, Placement(spans, ["resident"] * len(roles), roles, kept)
        self._allocate(plan)
        layers = slice(params.dense_layers, None)
        offload = [index for index, role in enumerate(roles) if role == "resident"]
        self._pages = len(offload)
        self._summaries[:, :, : self._pages] = summarise(prompt.keys[layers, :, sinks : plan.window_from], params.page)
        self._filled.fill_(self._pages)
        states = ["resident" if role == "sink" else "cold" for role in roles]
        kept = Kept.everywhere(torch.arange(sinks, device=context.device))
        return plan.layout(params, shape), Placement(spans, states, roles, kept, offload=offload, codec=RawCodec())

    def _allocate(self, plan: freekv_layout.Plan) -> None:
        """Tensors of the layers that are not dense, l of them, held for the whole run."""
        import torch

        shape, dtype, device = self.context.shape, self.context.dtype, self.context.device
        layers = shape.layers - self.params.dense_layers
        self._summaries = torch.zeros(layers, shape.kv_heads, plan.pages, 2, shape.head_dim, dtype=dtype, device=device)
        self._queries = torch.zeros(layers, shape.q_heads, shape.head_dim, dtype=dtype, device=device)
        self._selected = torch.full((layers, shape.kv_heads, plan.recall), -1, dtype=torch.long, device=device)
        self._filled = torch.zeros((), dtype=torch.long, device=device)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        if self._plan is None:
            return {}
        last = {"last_queries": (self._queries,), "last_selection": (self._selected,)}
        return {"summaries": (self._summaries, self._filled), **last}

    # ------------------------------------------------------------------------------------------------------------------
    # decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Selection
        from kvlens.methods.freekv import score as freekv_score

        plan, params, shape = self._plan, self.params, self.context.shape
        if plan is None or layer < params.dense_layers:
            return None
        at = layer - params.dense_layers
        candidate = torch.arange(plan.pages, device=q.device) < self._filled
        scale = shape.head_dim**-0.5 if params.score_scale == "sqrt_d" else 1.0
        score = freekv_score.page_scores(q, self._summaries[at], candidate, params.pooling, scale)
        selected = freekv_score.select(score, plan.recall)
        logged = torch.full((shape.kv_heads, plan.first_id + plan.pages), float("nan"), device=q.device)
        logged[:, plan.first_id :] = freekv_score.published(score, params.pooling).masked_fill(~candidate, float("nan"))
        reuse, now, head_columns, kv_columns = params.recall == "misses", None, {}, {}
        read, cause = selected, "recall"
        if self._speculates:
            similarity = freekv_score.similarity(q, self._queries[at], shape.kv_heads, params.correction_pooling)
            now = self._corrected(similarity)
            read, cause = torch.where(now[:, None], selected, self._selected[at]), "correction"
            head_columns = {"corrected": now.float().repeat_interleave(shape.group)}
            kv_columns = {"similarity": similarity}
        self._queries[at].copy_(q)
        self._selected[at].copy_(selected)
        return Selection(
            self._fine(read, plan),
            (selected + plan.first_id).masked_fill(selected < 0, -1),
            now=now,
            cause=cause,
            fits=True,
            reuse=reuse,
            score=logged,
            head_columns=head_columns,
            kv_columns=kv_columns,
        )

    def _corrected(self, similarity: torch.Tensor) -> torch.Tensor:
        """Which KV heads [H_kv] recall before their attention. At the two ends tau is a mode, whatever the cosine comes
        to: it may be negative, and 1.0 within rounding."""
        import torch

        tau = self.params.tau
        return similarity < tau if 0 < tau < 1 else torch.full_like(similarity, tau == 1, dtype=torch.bool)

    def _fine(self, rows: torch.Tensor, plan: freekv_layout.Plan) -> torch.Tensor:
        """Pages [H_kv, R] as a table over span ids [H_kv, G, S], the same for all query heads of a group."""
        import torch

        shape = self.context.shape
        fine = torch.zeros(shape.kv_heads, plan.first_id + plan.pages, dtype=torch.bool, device=rows.device)
        fine.scatter_(1, (rows + plan.first_id).masked_fill(rows < 0, 0), True)
        fine[:, 0] = False  # id 0, the window's, stood in for 'no page'
        return fine[:, None].expand(-1, shape.group, -1)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        from kvlens.memory.cold import RawCodec
        from kvlens.memory.kept import Kept
        from kvlens.memory.placement import Placement
        from kvlens.methods.freekv.score import summarise

        params, start = self.params, memory.window_start
        self._speculates = True
        if self._plan is None or end.position + 2 - start <= params.ring:
            return None
        stop = start + params.page
        keys = memory.read_window(start, stop)[0][params.dense_layers :]
        self._summaries[:, :, self._pages] = summarise(keys, params.page)[:, :, 0]
        self._pages += 1
        self._filled.fill_(self._pages)
        span = Span(
            start,
            stop,
            "page",
            f"A full page, the oldest of the window when it held {end.position + 1 - start} tokens.",
        )
        nothing = Kept.everywhere(torch.zeros(0, dtype=torch.long, device=keys.device))
        return WindowLeave(
            start, stop, Placement([span], ["cold"], ["resident"], nothing, offload=[0], codec=RawCodec())
        )
