"""SentenceKV: sentences in host memory, found by the mean of their keys and the mean query of the sentence that is
being written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.budget import BudgetInfeasible
from kvlens.methods.base import Method
from kvlens.methods.families.cold_pages import best
from kvlens.methods.hooks import Needs, WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.segmenter import PromptFacts, Segmenter
from kvlens.methods.sentencekv.params import OBSERVED, USUAL, Plan, SentenceKVParameters, closes, cut, planned, whole
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.spans.marks import mark_of
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


class SentenceKV(Method):
    """When the prompt has been read each KV head keeps, in host memory, the tokens that the window's queries attend to
    most, pooled over neighbours, up to a multiple of what a step attends; the others are gone. The device holds one
    vector per sentence, the mean of its kept keys. At every step sentences are ranked by its inner product with the
    mean query since the last sentence ended, and the kept tokens of the best ones are read until the budget is full,
    the last sentence in part. Sentences that decoding ends are kept whole.

    Departures: a KV head's group agrees on one set of tokens and one order, by the mean (paper: per query head); while
    a sentence begins, its first queries are averaged as they come, where the authors' code attends everything; the mean
    query starts with the prompt's queries since its last mark, where the code starts with none; the sentence that is
    being written stays attended, up to `longest` tokens beside `tokens`; no cap makes long sentences unreachable.
    """

    name = "sentencekv"
    title = "SentenceKV"
    paper = "Zhu et al., SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching, COLM 2025"
    summary = (
        "drops what the last prompt tokens do not attend to, keeps the mean key of each sentence on the device and the "
        "rest in host memory, and brings back the tokens of the sentences that the query of the moment asks for"
    )
    family = "token_retrieval"
    Parameters = SentenceKVParameters
    presets = {"paper": {"tokens": 1024}, "demo": {"sinks": 4, "window": 16, "longest": 32}}  # noqa: RUF012
    segmenters = (Segmenter("sentences (SentenceKV)", ("marks", "shortest", "longest", "sinks", "window")),)
    floor_is_exact = False
    needs = Needs(queries=OBSERVED)
    params: SentenceKVParameters

    def __init__(self, params: SentenceKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._kept = self._recall = 0
        """sentences in the index; tokens that can be retrieved, 0: all tokens stay on the device"""

    # ------------------------------------------------------------------------------------------------------- how much
    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        plan = planned(params, shape, prompt_tokens, max_new, max(USUAL, params.shortest))
        return _least(plan)

    @classmethod
    def bound_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        plan = planned(params, shape, prompt_tokens, max_new, params.longest)
        return min(_least(plan), cls.floor_bytes(params, shape, prompt_tokens, max_new))

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n, sinks = prompt.prompt_tokens, min(params.sinks, prompt.prompt_tokens)
        marks = [mark_of(piece, params.marks) for piece in prompt.tokens[sinks:n]]
        sentences = [span for span in cut(params, marks, sinks) if span.tok_end <= n - params.window]
        sink_spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are always attended.")] if sinks else []
        return [*sink_spans, *sentences]

    # ----------------------------------------------------------------------------------------------------- the prompt
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.link.codec import RawCodec
        from kvlens.memory.placement import Kept, Placement

        context, p, n = self.context, self.params, self.context.prompt_tokens
        spans = self.segments(p, context, ())
        roles = ["sink" if span.kind == "sink" else "resident" for span in spans]
        sentences = [span for span in spans if span.kind == "sentence"]
        start = spans[-1].tok_end if spans else 0
        self._plan = plan = Plan(p, context.shape, len(sentences), start, n, context.max_new)
        device = context.device
        if _fits_whole(plan, context.budget_bytes):
            placement = Kept.everywhere(torch.arange(start, device=device))
            return whole(plan), Placement(spans, ["resident"] * len(spans), roles, placement)
        recall = plan.within(context.budget_bytes)
        if recall is None:
            raise BudgetInfeasible(self.name, context.budget_bytes or 0, _least(plan), context.full_kv_bytes)
        self._recall = recall
        cold = self._choose_tokens(prompt, plan)
        self._allocate(prompt, sentences, cold.mask(n))
        offload = [number for number, role in enumerate(roles) if role == "resident"]
        states = ["resident" if role == "sink" else "cold" for role in roles]
        sinks = Kept.everywhere(torch.arange(plan.sinks, device=device))
        placed = Placement(spans, states, roles, sinks, offload=offload, codec=RawCodec(), cold=cold)
        return plan.layout(recall), placed

    def _choose_tokens(self, prompt: Prefilled, plan: Plan) -> Any:
        """Which of the sentences' tokens each KV head keeps, and by what score: as SnapKV ranks."""
        import torch

        from kvlens.memory.placement import Kept
        from kvlens.methods.families import window_attention as window

        p, shape, n = self.params, self.context.shape, plan.prompt_tokens
        score = torch.full((shape.layers, shape.kv_heads, n), torch.nan, device=self.context.device)
        inside, context_slice = min(p.window, prompt.last_queries.shape[2]), slice(plan.sinks, plan.window_from)
        for layer in range(shape.layers):
            observed = window.observed(prompt, layer, range(shape.q_heads), shape.group, inside, None)
            paid = window.pooled(window.received(*observed), p.kernel, "max")
            score[layer, :, context_slice] = window.grouped(paid, shape.group, "mean")[:, context_slice]
        room = int(p.factor * (p.sinks + p.window + self._recall)) - p.sinks - p.window
        count = max(1, min(room, plan.window_from - plan.sinks))
        order = score[..., context_slice].argsort(dim=-1, descending=True, stable=True)[..., :count]
        mask = torch.zeros(score.shape, dtype=torch.bool, device=score.device)
        return Kept.masked(mask.scatter(2, order + plan.sinks, True), score)

    def _allocate(self, prompt: Prefilled, sentences: list[Span], kept: torch.Tensor) -> None:
        import torch

        context, plan, shape = self.context, self._plan, self.context.shape
        size, device = (shape.layers, shape.kv_heads), context.device
        self._index = torch.zeros(*size, plan.rows, shape.head_dim, dtype=context.dtype, device=device)
        self._owner = torch.full((plan.total,), -1, dtype=torch.int32, device=device)
        self._there = torch.zeros(*size, plan.total, dtype=torch.bool, device=device)
        self._there[..., plan.sinks : plan.window_from] = kept[..., plan.sinks : plan.window_from]
        self._none = torch.full((shape.kv_heads, 0), -1, dtype=torch.long, device=device)
        for span in sentences:
            self._enter(span.tok_start, span.tok_end, prompt.keys[:, :, span.tok_start : span.tok_end])
        n, p = plan.prompt_tokens, self.params
        marks = [mark_of(piece, p.marks) for piece in context.tokens[plan.window_from : n]]
        self._ended = [span.tok_end for span in cut(p, marks, plan.window_from)]
        self._open = self._ended[-1] if self._ended else plan.window_from
        written = min(n - self._open, prompt.last_queries.shape[2])
        self._asked = prompt.last_queries[:, :, prompt.last_queries.shape[2] - written :].float().sum(2)
        self._queries = written

    def _enter(self, start: int, end: int, keys: torch.Tensor) -> None:
        """A sentence [start, end) with keys [L, H_kv, m, D] goes into the index."""
        weight = self._there[..., start:end].float()
        mean = (keys.float() * weight[..., None]).sum(2) / weight.sum(2).clamp(min=1)[..., None]
        self._index[:, :, self._kept] = mean.to(self._index.dtype)
        self._owner[start:end] = self._kept
        self._kept += 1

    # ------------------------------------------------------------------------------------------------------ decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Selection

        if not self._recall:
            return None
        plan, shape = self._plan, self.context.shape
        self._asked[layer] += q.float()
        mean = (self._asked[layer] / (self._queries + 1)).unflatten(0, (shape.kv_heads, -1))
        score = (mean @ self._index[layer].float().transpose(-1, -2)).mean(1)
        owner = self._owner.clamp(min=0).long().expand(shape.kv_heads, -1)
        is_stored = self._there[layer] & (self._owner >= 0)
        has_tokens = torch.zeros_like(score).scatter_add(1, owner, is_stored.float()) > 0
        score = score.masked_fill(~has_tokens, float("-inf"))
        rows = best(score.gather(1, owner).masked_fill(~is_stored, float("-inf")), self._recall)
        spans = owner.gather(1, rows.clamp(min=0)) + plan.first_id
        fine = torch.zeros(shape.kv_heads, plan.first_id + plan.rows, dtype=torch.bool, device=q.device)
        fine.scatter_(1, spans.masked_fill(rows < 0, 0), True)
        fine[:, 0] = False  # id 0, the window's, stood in for 'no token'
        logged = torch.full(fine.shape, float("nan"), device=q.device)
        logged[:, plan.first_id :] = score.masked_fill(~has_tokens, float("nan"))
        reads = self._kept * self._index.shape[-1] * self._index.element_size()
        return Selection(
            fine[:, None].expand(-1, shape.group, -1), self._none, rows=rows, score=logged, index_bytes=reads
        )

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        from kvlens.link.codec import RawCodec
        from kvlens.memory.placement import Kept, Placement

        if not self._recall:
            return None
        now, start = end.position + 1, memory.window_start
        self._queries += 1
        if closes(self.params, now - self._open, mark_of(end.text, self.params.marks)) is not None:
            self._ended.append(now)
            self._open, self._queries = now, 0
            self._asked.zero_()
        if not self._ended or self._ended[0] > now - self.params.window:
            return None
        stop = self._ended.pop(0)
        self._there[..., start:stop] = True
        self._enter(start, stop, memory.read_window(start, stop)[0])
        span = Span(start, stop, "sentence", f"Older than the newest {self.params.window} tokens.")
        nothing = Kept.everywhere(torch.empty(0, dtype=torch.long, device=self.context.device))
        placed = Placement([span], ["cold"], ["resident"], nothing, offload=[0], codec=RawCodec())
        return WindowLeave(start, stop, placed)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        if not self._recall:
            return {}
        return {"sentences": (self._index, self._owner, self._there), "queries": (self._asked,)}


def _least(plan: Plan) -> int:
    """Device bytes with the fewest retrieved tokens, or with all tokens where that takes less."""
    least, all_ = plan.bytes(plan.least), whole(plan).bytes(plan.shape)
    return least if plan.params.tokens and plan.total > plan.params.tokens else min(least, all_)


def _fits_whole(plan: Plan, budget: int | None) -> bool:
    """Nothing has to leave the device."""
    if plan.params.tokens and plan.total > plan.params.tokens:
        return False
    return budget is None or whole(plan).bytes(plan.shape) <= budget
