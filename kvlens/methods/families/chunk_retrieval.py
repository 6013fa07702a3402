"""Token retrieval by chunks: the text is cut at punctuation, its chunks lie in the cold tier with an index of each on
the device, and at every step the tokens of the best chunks are attended, up to a number of tokens.

A token counts as much as its chunk, so what is read of a chunk is all of it or, of the last one, its first tokens: such
methods need places, budgets and residency by span and never by position (kvlens/methods/families/token_retrieval.py
is for those that do). A method of this family says its index and its score. Shapes: H_kv KV heads, G query heads per KV
head, R readers per KV head, C rows of the chunk tables, one per closed chunk in the order of birth; D head size, F
numbers of the index of a chunk; l layers that select.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from kvlens.budget import BudgetInfeasible
from kvlens.methods.base import Method
from kvlens.methods.families import chunk_plan
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.spans.marks import mark_of, set_for
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


class ChunkRetrieval(Method):
    """Base of the family. `params` is a ChunkRetrievalParameters, or has its fields."""

    family = "token_retrieval"
    floor_is_exact = False
    journal_names = {  # noqa: RUF012
        "token_budget": "tokens attended at a step by one reader: [in all, sinks, open chunk, of closed chunks]",
        "preselection_bytes": (
            "at the end of prefill: [bytes of the closed chunks' index, bytes of the full KV of their tokens]"
        ),
    }
    scores_stored = False
    """`score` takes q and the index in the types that they are stored in, not in float32"""
    params: Any

    def __init__(self, params: Any, context: RunContext) -> None:
        super().__init__(params, context)
        self._marks = _marks(params, context)
        self._splitter = params.splitter()

    @classmethod
    @abstractmethod
    def index_numbers(cls, head_dim: int) -> int:
        """F, numbers of the model's dtype in the index of one chunk of one KV head."""

    @abstractmethod
    def index(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [l, H_kv, m, D] of one chunk, post-RoPE -> [l, H_kv, F]."""

    @abstractmethod
    def score(self, q: torch.Tensor, index: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """q [H_kv, G, D], index [H_kv, C, F], both float32 or as stored, alive bool [C]: rows in use -> float32 [H_kv,
        R, C], -inf for rows not in use; R = G where every query head selects for itself, else 1."""

    @property
    def equal_reuse(self) -> bool:
        """As kvlens.memory.placement.Selection has it."""
        return False

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        numbers = cls.index_numbers(shape.head_dim)
        plan = chunk_plan.expected(params, shape, numbers, prompt_tokens, max_new)
        return plan.bytes(plan.least_recall())

    @classmethod
    def bound_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """As if every chunk were as long as one can be."""
        numbers, longest = cls.index_numbers(shape.head_dim), params.splitter().most
        plan = chunk_plan.expected(params, shape, numbers, prompt_tokens, max_new, longest)
        return min(plan.bytes(plan.least_recall()), cls.floor_bytes(params, shape, prompt_tokens, max_new))

    # ---------------------------------------------------------------------------------------------------- the prompt
    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n, sinks = prompt.prompt_tokens, min(params.sinks, prompt.prompt_tokens)
        pieces = prompt.tokens[sinks:n]
        assert len(pieces) == n - sinks, "the splitter needs the text of every prompt token"
        marks = _marks(params, prompt)
        chunks = params.splitter().cut([mark_of(piece, marks) for piece in pieces], sinks)[:-1]
        return [*([Span(0, sinks, "sink", f"The first {sinks} tokens are always attended.")] if sinks else []), *chunks]

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.link.codec import RawCodec
        from kvlens.memory.placement import Kept, Placement

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

    def _sizes(self, chunks: list[Span]) -> chunk_plan.Plan:
        context, params, shape = self.context, self.params, self.context.shape
        unlimited = context.budget_bytes is None and not params.usage
        dense = shape.layers if unlimited else min(params.dense_layers, shape.layers)
        n, sinks = context.prompt_tokens, min(params.sinks, context.prompt_tokens)
        ends, numbers = [c.tok_end for c in chunks], self.index_numbers(shape.head_dim)
        return chunk_plan.of_chunks(params, shape, numbers, ends, sinks, n, context.max_new, dense)

    def _check_usage(self) -> None:
        plan, params = self._plan, self.params
        budget = plan.token_budget(self._position)
        if params.usage and plan.compressed and budget <= plan.sinks + 1:
            raise ValueError(
                f"{self.name}: usage {params.usage:g} of {self._position + 1} tokens is a budget of {budget} tokens, "
                f"which sinks and open chunk use up: raise usage."
            )

    def _allocate(self) -> None:
        import torch

        context, plan, shape = self.context, self._plan, self.context.shape
        size = (plan.compressed, shape.kv_heads, plan.rows, plan.numbers)
        self._index = torch.zeros(size, dtype=context.dtype, device=context.device)
        self._lengths = torch.zeros(plan.rows if plan.compressed else 0, dtype=torch.long, device=context.device)
        self._quota = self._lengths.new_zeros(min(1, plan.compressed))
        self._rows = 0
        self._budget_tokens()

    def _register(self, edges: list[tuple[int, int]], keys: torch.Tensor, start: int) -> None:
        """Chunks with these position ranges go into the index; keys [L, H_kv, m, D] of the tokens from `start` on."""
        import torch

        if not edges or not self._plan.compressed:
            return
        rows, indexed_keys = slice(self._rows, self._rows + len(edges)), keys[self._plan.dense :]
        size = (*indexed_keys.shape[:2], self._plan.numbers)
        chunks = (self.index(indexed_keys[:, :, a - start : b - start]) for a, b in edges)
        self._index[:, :, rows] = torch.stack([self.checks.finite("index", chunk, size) for chunk in chunks], 2)
        self._lengths[rows] = torch.tensor([b - a for a, b in edges], device=self._lengths.device)
        self._rows += len(edges)

    # ------------------------------------------------------------------------------------------------------ decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Selection, index_read
        from kvlens.methods.families.token_choice import choose

        plan, shape = self._plan, self.context.shape
        if layer < plan.dense or not plan.rows:
            return None
        row, alive = layer - plan.dense, self._lengths > 0
        grouped, stored = q.unflatten(0, (shape.kv_heads, -1)), self._index[row]
        if not self.scores_stored:
            grouped, stored = grouped.float(), stored.float()
        sizes = tuple((shape.kv_heads, readers, plan.rows) for readers in (shape.group, 1))
        score = self.checks.scores("score", self.score(grouped, stored, alive), *sizes, layer=layer)
        tokens, fine, wishes = choose(score, self._lengths, self._quota, plan.first_id, shape.group)
        if row == 0:
            self.note("token_budget", self._seen)
        logged = None
        if self.keeps_journal:
            logged = torch.full((shape.kv_heads, plan.first_id + plan.rows), float("nan"), device=q.device)
            logged[:, plan.first_id :] = score.amax(1).masked_fill(~alive, float("nan"))
        return Selection(
            fine,
            wishes,
            tokens=tokens,
            equal_reuse=self.equal_reuse,
            fits=True,
            score=logged,
            index_bytes=index_read(lambda: self._rows * plan.numbers * self._index.element_size()),
        )

    def _budget_tokens(self) -> None:
        """What one reader attends of closed chunks at the step that comes, and what it attends in all."""
        import torch

        plan = self._plan
        quota = plan.quota(self._position, self._open, self._recall)
        parts = (plan.sinks, self._position + 1 - self._open, min(quota, self._open - plan.sinks))
        self._quota.fill_(quota)
        self._seen = torch.tensor([sum(parts), *parts], dtype=torch.float32)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        self._position = end.position + 1
        leave = self._close(end, memory)
        self._budget_tokens()
        return leave

    def _close(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        """The open chunk leaves the window when its last token says so."""
        import torch

        from kvlens.link.codec import RawCodec
        from kvlens.memory.placement import Kept, Placement

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
        placement = Placement([chunk], [state], ["resident"], none, offload=cold, codec=RawCodec())
        return WindowLeave(start, start + count, placement)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"index": (self._index,), "lengths": (self._lengths, self._quota)}


def _marks(params: Any, prompt: PromptFacts) -> str:
    """Name of the set of marks: the parameter's, or the one that suits the model."""
    return set_for(prompt.model_name) if params.marks == "auto" else str(params.marks)
