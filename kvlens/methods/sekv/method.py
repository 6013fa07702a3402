"""SeKV: spans cut by surprisal, coarse on the device and low-rank in host memory, expanded where a query asks for
detail."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlens.budget import BudgetInfeasible
from kvlens.methods.base import Method
from kvlens.methods.hooks import FactorForm, Needs, WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.methods.sekv import layout as sekv_layout
from kvlens.methods.sekv.journal import JOURNAL
from kvlens.methods.sekv.params import PRESETS, SeKVParameters
from kvlens.methods.sekv.segmenters import SEGMENTERS
from kvlens.methods.sekv.spans import COMPRESSED, segment
from kvlens.methods.sekv.trained import HEADS, ROUTER
from kvlens.shape import KVShape
from kvlens.spans import Span, Surprisal
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection
    from kvlens.methods.sekv.router import Router

ROLES = {"sink": "sink", "anchor": "anchor", "short": "resident"}
"""Role of the kept tokens of each kind of span."""


class SeKV(Method):
    """Resolution-adaptive cache. Per (layer, query head) a span is read through its mean key and value with log|S|
    added to the score, or token by token once its gate sigmoid(q' . K_S / sqrt(d') + log|S|) exceeds tau (eq. 5, 9).
    What is fetched is shared by the group of a KV head; which resolution is read is each query head's own. Departures
    from the paper: docs/evidence/sekv.md.

    With `whole_share` some KV heads keep every token and attend all of them: they have no coarse entries, nothing in
    host memory and nothing to expand.

    State: the routing table, one row per compressed span (kvlens.methods.sekv.routing).
    """

    name = "sekv"
    title = "SeKV"
    paper = (
        "Abaskohi et al., SeKV: Resolution-Adaptive KV Cache with Hierarchical Semantic Memory for "
        "Long-Context LLM Inference"
    )
    summary = (
        "cuts the prompt where tokens surprise, keeps those tokens and one coarse entry per span on the "
        "device, the spans in host memory (as low-rank factors where these are smaller), and brings back the ones a "
        "query head asks for"
    )
    segmenters = SEGMENTERS
    calibrations = (ROUTER, HEADS)
    family = "span_retrieval"
    Parameters = SeKVParameters
    presets = PRESETS
    static_ready = True
    exact_without_budget = False
    floor_is_exact = False
    untrained = {"router": "pca"}  # noqa: RUF012
    stand_ins = {"router": "untrained router"}  # noqa: RUF012
    needs = Needs(queries=128, surprisal=True)
    journal_names = JOURNAL
    params: SeKVParameters

    def __init__(self, params: SeKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        sekv_layout.check_dim(params, context.shape.head_dim)
        if params.pre_rope:
            context.rotary("pre_rope", ": leave pre_rope off")
        self._trained: Router | None = context.calibration.get("trained router")
        self._nats: list[float] = []

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return sekv_layout.drawn_bytes(params, shape, prompt_tokens, max_new, 0)

    @classmethod
    def likely_bytes(
        cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None
    ) -> int:
        """With the anchors that the budget allows: each is kept and cuts a span in two."""
        cap = sekv_layout.anchor_cap(params, shape, budget_bytes)
        return sekv_layout.drawn_bytes(params, shape, prompt_tokens, max_new, cap)

    @classmethod
    def bound_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """As if the text had no anchors and one short span: window, tables and one expanded span are left."""
        short = max(0, min(prompt_tokens - params.window, params.l_min))
        spans = [Span(0, short, COMPRESSED[0], "")] if short else []
        plan = sekv_layout.plan(params, spans, short + min(prompt_tokens, params.window), max_new)
        return plan.bytes(params, shape, plan.least_recall(params))

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        prefix = max(0, prompt.prompt_tokens - params.window)
        cap = sekv_layout.anchor_cap(params, prompt.shape, prompt.budget_bytes)
        return segment(params, surprisal[:prefix], 0, Surprisal.measure(surprisal), cap)

    # ---- end of prefill
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.methods.sekv.routing import Routing, WholeHeads

        context, params = self.context, self.params
        assert prompt.surprisal is not None
        self._nats = prompt.surprisal.tolist()
        self._stats = Surprisal.measure(self._nats)
        spans, plan = self._cut(context.budget_bytes)
        tokens = sum(len(span) for span in spans if span.kind in COMPRESSED)
        blocks = plan.leaves * params.block
        recall = plan.recall_within(params, context.shape, context.budget_bytes, tokens + blocks)
        if recall is None:
            raise BudgetInfeasible(self.name, context.budget_bytes or 0, self._smallest(), context.full_kv_bytes)
        self._capacity, self._ring = plan.spans, plan.ring
        self._whole = WholeHeads(plan.whole, context.shape, context.device)
        self._routing = Routing(params, context, (plan.coarse, plan.pieces), self._trained)
        self._routing.fit(prompt.keys)
        placement = self._place(spans, 1, prompt.keys, prompt.values, 0)
        ends = torch.tensor([s.tok_end for s in spans if s.kind in COMPRESSED])
        self._routing.fit_threshold(prompt.last_queries, context.prompt_tokens, ends)
        for layer, logits in enumerate(self._routing.threshold):
            whole = self._whole.mask[layer]
            never = logits.isinf() | whole.repeat_interleave(context.shape.group)
            self.note("logit_tau", logits.clone().masked_fill(never, float("nan")), layer)
            if plan.whole:
                self.note("whole", whole.float(), layer)
        return plan.layout(params, context.shape, recall), placement

    def _cut(self, budget: int | None) -> tuple[list[Span], sekv_layout.Plan]:
        """Spans of the prompt before the window, and the sizes they need, with as many whole KV heads as their share
        and what the others need at least leave room for."""
        params, context = self.params, replace(self.context, budget_bytes=budget)
        spans = self.segments(params, context, self._nats)
        sizes, shape = (context.prompt_tokens, context.max_new), context.shape
        plan = sekv_layout.plan(params, spans, *sizes)
        count = sekv_layout.whole_count(params, shape, *sizes, budget)
        if budget is None or not count or not any(span.kind in COMPRESSED for span in spans):
            return spans, plan
        ranked = context.calibration["retrieval heads"].ranked(params.whole_by, shape.group)[:count]
        while ranked and plan.with_whole(ranked).bytes(params, shape, plan.least_recall(params)) > budget:
            ranked.pop()
        return spans, plan.with_whole(ranked)

    def _smallest(self) -> int:
        """The least budget that is feasible: a larger one allows more anchors, so it is approached from below."""
        need, budget = 0, -1
        while need > budget:
            budget = need
            _, plan = self._cut(budget)
            need = plan.bytes(self.params, self.context.shape, plan.least_recall(self.params))
        return budget

    def _place(
        self, spans: list[Span], first_id: int, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> Placement:
        """Where the spans of one range go; registers the compressed ones in the routing table. keys, values [L, H_kv,
        m, D]."""
        import torch

        from kvlens.memory.placement import Kept, Placement
        from kvlens.methods.sekv import router as sekv_router
        from kvlens.methods.sekv.codec import SpanCodec

        device, params = keys.device, self.params
        compressed = [i for i, span in enumerate(spans) if span.kind in COMPRESSED]
        positions = [t for span in spans if span.kind in ROLES for t in range(span.tok_start, span.tok_end)]
        weights = self._weights(start, start + keys.shape[2], device)
        ranges = [(spans[i].tok_start - start, spans[i].tok_end - start) for i in compressed]
        mean_keys, mean_values = (sekv_router.span_means(x, weights, ranges) for x in (keys, values))
        ids = [first_id + i for i in compressed]
        shared = self._routing.add(ids, ranges, mean_keys, keys, weights)
        packing = {span: shared[:, :, place] for place, span in enumerate(ids)}
        away = "coarse" if params.coarse else "cold"
        return Placement(
            spans,
            [away if span.kind in COMPRESSED else "resident" for span in spans],
            [ROLES.get(span.kind, "resident") for span in spans],
            Kept.everywhere(torch.tensor(positions, dtype=torch.long, device=device)),
            coarse=compressed if params.coarse else [],
            coarse_keys=mean_keys,
            coarse_values=mean_values,
            offload=compressed,
            codec=SpanCodec(
                params,
                None if self._trained is None else self._trained.gates,
                packing,
                self.context.rotate,
                self._tell,
                self._whole.mask,
            ),
        )

    def _tell(self, ids: list[int], figures: dict[str, torch.Tensor]) -> None:
        """The codec has packed the spans `ids` of one placement: figures [S, L, H_kv] by name."""
        import torch

        self.note("spans", torch.tensor(ids, dtype=torch.float32))
        packed = (~self._whole.mask).nonzero().tolist()
        for name, values in figures.items():
            for layer, head in packed:
                self.note(name, values[:, layer, head], layer, head)

    def _weights(self, start: int, end: int, device: torch.device) -> torch.Tensor:
        """What eq. 2 weights the tokens [start, end) by: nats, or one for all."""
        import torch

        nats = torch.tensor(self._nats[start:end], device=device).nan_to_num(0.0)
        return nats if self.params.weights == "surprisal" else torch.ones_like(nats)

    # ---- decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        from kvlens.methods.sekv.routing import selection

        tables = self._routing, self._capacity, self._whole
        records = self.keeps_journal or self.params.zones != "head"  # KV heads that share a zone compete by the score
        launch = self.in_graph and not records
        return selection(self.params, self.context.shape, *tables, layer, q, records=records, launch=launch)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        params = self.params
        self._nats.append(end.surprisal)
        start = memory.window_start
        if end.position + 1 - start < self._ring:
            return None
        stop = start + params.block
        spans = segment(params, self._nats[start:stop], start, self._stats, sekv_layout.block_anchor_cap(params))
        placement = self._place(spans, len(memory.spans), *memory.read_window(start, stop), start)
        return WindowLeave(start, stop, placement)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"routing": self._routing.held()}

    def factor_form(self) -> FactorForm | None:
        params = self.params
        return (
            None
            if params.form == "raw"
            else FactorForm(params.max_rank, self.context.rotate if params.pre_rope else None)
        )
