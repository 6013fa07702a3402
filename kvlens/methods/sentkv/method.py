"""SentKVCompress: chunks that end at punctuation, minimum and maximum key on the device, tokens of the best chunks
brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.memory.budget import BudgetInfeasible
from kvlens.memory.layout import Layout
from kvlens.methods.base import MemoryView, Method, Prefilled, RunContext, StepEnd, WindowLeave
from kvlens.methods.segmenter import PromptFacts, Segmenter
from kvlens.methods.sentkv import layout as sentkv_layout
from kvlens.methods.sentkv.params import PRESETS, SentKVParameters
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.spans.marks import mark_of, set_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


class SentKVCompress(Method):
    """Every prompt chunk but the newest lies in the cold tier; the device holds its element-wise extremes per KV head.
    At each step a token counts as much as its chunk's bound on q . k, the best ones up to the token budget are
    attended, beside sinks and the chunk that is still open. Departures from the paper: docs/fidelity.md.

    State, shapes: C rows of the chunk tables, one per closed chunk in the order of birth; l layers that select.
    """

    name = "sentkv"
    title = "SentKVCompress"
    paper = (
        "SentKVCompress: Sentence-Level Dynamic KVCache Compression for Efficient Long-Context LLM "
        "Inference (ICLR 2026 submission)"
    )
    summary = (
        "cuts the text at punctuation near a wanted length, keeps the extremes of each chunk's keys on the "
        "device, the chunks in host "
        "memory, and brings back the tokens of the best chunks up to a token budget"
    )
    segmenters = (Segmenter("sentence chunks (SentKVCompress)", ("length", "deviation", "marks", "sinks")),)
    family = "token_retrieval"
    Parameters = SentKVParameters
    presets = PRESETS
    static_ready = True
    floor_is_exact = False
    journal_names = {  # noqa: RUF012
        "token_budget": "tokens attended at a step by one reader: [in all, sinks, open chunk, of closed chunks]",
        "preselection_bytes": (
            "at the end of prefill: [bytes of the closed chunks' extremes, bytes of the full KV of their tokens]"
        ),
    }
    params: SentKVParameters

    def __init__(self, params: SentKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._marks = _marks(params, context)
        self._splitter = params.splitter()

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        plan = sentkv_layout.expected(params, shape, prompt_tokens, max_new)
        return plan.bytes(plan.least_recall())

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n, sinks = prompt.prompt_tokens, min(params.sinks, prompt.prompt_tokens)
        pieces = prompt.tokens[sinks:n]
        assert len(pieces) == n - sinks, "the splitter needs the text of every prompt token"
        marks = _marks(params, prompt)
        chunks = params.splitter().cut([mark_of(piece, marks) for piece in pieces], sinks)[:-1]
        return [*([Span(0, sinks, "sink", f"The first {sinks} tokens are always attended.")] if sinks else []), *chunks]

    # ------------------------------------------------------------------------------------------------------------ end
    # of prefill
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.cold import RawCodec
        from kvlens.memory.kept import Kept
        from kvlens.memory.placement import Placement

        context = self.context
        spans = self.segments(self.params, context, ())
        chunks = [span for span in spans if span.kind == "chunk"]
        self._plan = plan = self._sizes(chunks)
        recall = plan.recall_within(context.budget_bytes)
        if recall is None:
            raise BudgetInfeasible(
                self.name, context.budget_bytes or 0, plan.bytes(plan.least_recall()), context.full_kv_bytes
            )
        self._recall, self._position, self._open = recall, context.prompt_tokens, plan.window_from
        self._check_usage()
        self._allocate()
        self._register([(c.tok_start, c.tok_end) for c in chunks], prompt.keys, 0)
        covered = (
            (plan.window_from - plan.sinks) * plan.compressed * context.shape.kv_heads * context.shape.head_token_bytes
        )
        self.note("preselection_bytes", torch.tensor([plan.table_bytes(len(chunks)), covered], dtype=torch.float32))
        sinks = len(spans) - len(chunks)
        cold = list(range(sinks, len(spans))) if plan.compressed else []
        return plan.layout(recall), Placement(
            spans,
            ["resident"] * sinks + ["cold" if cold else "resident"] * len(chunks),
            ["sink"] * sinks + ["resident"] * len(chunks),
            Kept.everywhere(torch.arange(plan.sinks, device=context.device)),
            offload=cold,
            codec=RawCodec(),
        )

    def _sizes(self, chunks: list[Span]) -> sentkv_layout.Plan:
        context, params = self.context, self.params
        unlimited = context.budget_bytes is None and not params.usage
        dense = context.shape.layers if unlimited else min(params.dense_layers, context.shape.layers)
        n, sinks = context.prompt_tokens, min(params.sinks, context.prompt_tokens)
        return sentkv_layout.of_chunks(
            params, context.shape, [c.tok_end for c in chunks], sinks, n, context.max_new, dense
        )

    def _check_usage(self) -> None:
        plan, params = self._plan, self.params
        budget = plan.token_budget(self._position)
        if params.usage and plan.compressed and budget <= plan.sinks + 1:
            raise ValueError(
                f"sentkv: usage {params.usage:g} of {self._position + 1} tokens is a budget of {budget} "
                f"tokens, which sinks and open chunk "
                "use up: raise usage."
            )

    def _allocate(self) -> None:
        import torch

        context, plan, shape = self.context, self._plan, self.context.shape
        size = (plan.compressed, shape.kv_heads, plan.rows, shape.head_dim)
        self._high = torch.zeros(size, dtype=context.dtype, device=context.device)
        self._low = torch.zeros_like(self._high)
        self._lengths = torch.zeros(plan.rows if plan.compressed else 0, dtype=torch.long, device=context.device)
        self._quota = self._lengths.new_zeros(min(1, plan.compressed))
        self._rows = 0
        self._budget_tokens()

    def _register(self, edges: list[tuple[int, int]], keys: torch.Tensor, start: int) -> None:
        """Extremes of chunks with these position ranges; keys [L, H_kv, m, D] of the tokens from `start` on."""
        import torch

        from kvlens.methods.sentkv.select import extremes

        if not edges or not self._plan.compressed:
            return
        at = slice(self._rows, self._rows + len(edges))
        self._high[:, :, at], self._low[:, :, at] = extremes(keys[self._plan.dense :], edges, start)
        self._lengths[at] = torch.tensor([b - a for a, b in edges], device=self._lengths.device)
        self._rows += len(edges)

    # ------------------------------------------------------------------------------------------------------------------
    # decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Selection
        from kvlens.methods.sentkv import select as sentkv_select

        plan, params, shape = self._plan, self.params, self.context.shape
        if layer < plan.dense or not plan.rows:
            return None
        at = layer - plan.dense
        alive = self._lengths > 0
        bound = sentkv_select.bounds(q.view(shape.kv_heads, -1, shape.head_dim), self._high[at], self._low[at])
        score = sentkv_select.pool(
            bound, alive, params.group, shape.head_dim**-0.5 if params.score_scale == "sqrt" else 1.0
        )
        taken = sentkv_select.take(score, self._lengths, self._quota)
        ranked = sentkv_select.ranking(score, taken)
        if at == 0:
            self.note("token_budget", self._seen)
        ids = slice(plan.first_id, plan.first_id + plan.rows)
        tokens = taken.new_zeros(shape.kv_heads, shape.group, ids.stop)
        tokens[:, :, ids] = taken
        logged = torch.full((shape.kv_heads, ids.stop), float("nan"), device=q.device)
        logged[:, ids] = score.amax(1).masked_fill(~alive, float("nan"))
        return Selection(
            tokens > 0,
            torch.where(ranked < 0, ranked, ranked + plan.first_id),
            tokens=tokens,
            equal_reuse=params.truncate,
            fits=True,
            score=logged,
        )

    def _budget_tokens(self) -> None:
        """What one reader attends of closed chunks at the step that comes, and what it attends in all."""
        import torch

        plan = self._plan
        quota = plan.quota(self._position, self._open, self._recall)
        seen = (plan.sinks, self._position + 1 - self._open, min(quota, self._open - plan.sinks))
        self._quota.fill_(quota)
        self._seen = torch.tensor([sum(seen), *seen], dtype=torch.float32)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        self._position = end.position + 1
        leave = self._close(end, memory)
        self._budget_tokens()
        return leave

    def _close(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        """The open chunk leaves the window when its last token says so."""
        import torch

        from kvlens.memory.cold import RawCodec
        from kvlens.memory.kept import Kept
        from kvlens.memory.placement import Placement

        start = self._open
        closing = self._splitter.close(end.position + 1 - start, mark_of(end.text, self._marks))
        if closing is None:
            return None
        count, reason = closing
        self._open = start + count
        cold = [0] if self._plan.compressed else []
        if cold:
            self._register([(start, start + count)], memory.read_window(start, start + count)[0], start)
        none = Kept.everywhere(torch.empty(0, dtype=torch.long, device=self.context.device))
        chunk = Span(start, start + count, "chunk", reason)
        state = "cold" if cold else "resident"
        return WindowLeave(
            start, start + count, Placement([chunk], [state], ["resident"], none, offload=cold, codec=RawCodec())
        )

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"extremes": (self._high, self._low), "lengths": (self._lengths, self._quota)}


def _marks(params: SentKVParameters, prompt: PromptFacts) -> str:
    """Name of the set of marks: the parameter's, or the one that suits the model."""
    return set_for(prompt.model_name) if params.marks == "auto" else params.marks
