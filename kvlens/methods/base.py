"""What a KV-cache method is: published parameters and four hooks. It says what it wants; the memory moves, counts and
refuses.

A method is one file with one class, and one line in kvlens/methods/__init__.py (or an entry point `kvlens.methods` in a
package of the user's own). Method files import torch inside their hooks only, so that forms and listings need no torch;
tensor mathematics belongs in kernels/ or in a module beside the method.

Shapes: L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, n prompt tokens that prefill covered, S
span ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvlens.memory.budget import BudgetInfeasible
from kvlens.memory.layout import Layout
from kvlens.shape import KVShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Eviction, Placement, Selection
    from kvlens.methods.given import MemoryView, Prefilled, Reading, Rotate, RunContext, StepEnd
    from kvlens.methods.modelfigures import Calibration
    from kvlens.methods.segmenter import PromptFacts, RunSizes, Segmenter
    from kvlens.methods.statements import Statement
    from kvlens.spans import Span


@dataclass(frozen=True)
class FactorForm:
    """How spans lie in the cold tier as low-rank factors, packed as kvlens/kernels/lowrank.py says."""

    max_rank: int
    """no unit has more components"""
    turn: Rotate | None
    """what reconstructed keys still need: the model's rotary embedding, where they were decomposed without it"""


@dataclass(frozen=True)
class Note:
    """A line of a method's journal; see kvlens.rows.JournalRow."""

    name: str
    values: torch.Tensor
    layer: int | None
    kv_head: int | None


@dataclass
class WindowLeave:
    """Positions [start, end) leave the window and go where `placement` says."""

    start: int
    end: int
    placement: Placement


@dataclass
class BagChange:
    """What changes in a bag (Layout.bag) because a step has ended."""

    evicted: Eviction | None = None
    """what gives way to the next step's token; None: a place is free"""
    opened: Placement | None = None
    """spans that decoded tokens belong to from now on, with no kept tokens of their own: nothing moves"""


FAMILIES = {
    "reference": "all KV, all attended",
    "prompt_eviction": "scores the prompt once and drops the rest for good",
    "decode_eviction": "drops for good while decoding",
    "page_retrieval": "ranks pages of tokens at every step, or when it is unsure",
    "token_retrieval": "reads single tokens, chosen at every step",
    "span_retrieval": "reads spans as summaries, low-rank factors or tokens",
    "quantisation": "keeps every token, in few bits",
    "other": "none of these",
}
"""family -> what its methods do; colours and lists of methods go by it"""


class Method(ABC):
    """Base of all methods. One object lives for one run; it holds its own index tensors and announces them in
    `held`."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    """citation, or what the baseline is"""
    summary: ClassVar[str]
    """one sentence: what it keeps, drops and fetches"""
    family: ClassVar[str] = "other"
    """one of FAMILIES"""
    Parameters: ClassVar[type]
    """frozen dataclass whose fields are made with `param`"""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    exact_without_budget: ClassVar[bool] = True
    """with no budget limit it attends everything exactly, so it equals FullKV"""
    floor_is_exact: ClassVar[bool] = True
    """`floor_bytes` is what `prefill_end` will ask for; False: an estimate, since it depends on the text"""
    keeps_all: ClassVar[bool] = False
    """the KV of every token stays on the device: no budget below full KV is feasible, and the default is no limit"""
    segmenters: ClassVar[tuple[Segmenter, ...]] = ()
    """its ways to cut a prompt, for the Spans page"""
    loses_at: ClassVar[tuple[str, str]] = ("multikey", "10%")
    """(task, budget) at which it loses answers of the demo model at 2048 tokens, where `kvlens bench explain` begins"""
    calibrations: ClassVar[tuple[Calibration, ...]] = ()
    """figures of the model that it needs; they come in the context"""
    statements: ClassVar[tuple[Statement, ...]] = ()
    """what its paper says of it, as comparisons that `kvlens bench claims` makes"""
    untrained: ClassVar[dict[str, Any]] = {}
    """parameters with which it runs on a model that nothing was trained or calibrated for"""
    static_ready: ClassVar[bool] = False
    """`select` keeps to fixed shapes, so that kvlens.lab.gpu.static can compile or capture a step of it"""
    selects_between_steps: ClassVar[bool] = False
    """`select` looks at neither query nor layer: what it answers changes in `decode_end` only"""
    observed_queries: ClassVar[int] = 0
    """how many of the last prompt queries `prefill_end` wants to see"""
    peeks: ClassVar[bool] = False
    """the last prompt token's query, key and value under full attention are wanted at `prefill_end`, though step 0
    feeds that token"""
    needs_surprisal: ClassVar[bool] = False
    """every prompt token's surprisal is wanted at `prefill_end`; else a recorded run computes them after its last step,
    and an unrecorded one never"""
    watches: ClassVar[bool] = False
    """`attended` is called with every step's attention weights, which are computed for it beside the attention"""
    needs_received: ClassVar[bool] = False
    """the attention that every prompt token received is wanted at `prefill_end`"""
    needs_inputs: ClassVar[bool] = False
    """what each layer's attention was given is wanted at `prefill_end`: the prompt is read for this run alone"""
    journal_names: ClassVar[dict[str, str]] = {}
    """what `note` may be called with: name (with its unit) -> one sentence on what the values are and how they are
    indexed"""

    def __init__(self, params: Any, context: RunContext) -> None:
        self.params, self.context = params, context
        self._journal: list[Note] = []
        self.keeps_journal = True
        """False: notes are dropped, for a step that may not grow a list (kvlens/lab/gpu/static)"""

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """Estimate, before anything has run, of the least device bytes this method can decode such a prompt with. No
        torch."""
        raise NotImplementedError(cls.name)

    @classmethod
    def likely_bytes(
        cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None
    ) -> int:
        """Estimate of the device bytes that such a prompt needs where the budget is `budget_bytes`: by this parameters
        are chosen. It differs from the floor where a larger budget asks for more. None: no limit. No torch."""
        return cls.floor_bytes(params, shape, prompt_tokens, max_new)

    @classmethod
    def bound_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """Device bytes below which no text of that length can be decoded: by this a run is refused before anything is
        loaded. 0: nothing is known."""
        return cls.floor_bytes(params, shape, prompt_tokens, max_new) if cls.floor_is_exact else 0

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span] | None:
        """The spans that `prefill_end` would cut, up to where the window begins: for looking at a text through several
        methods without running them. surprisal [prompt_tokens]: nats, NaN where there is none. No torch. None: this
        method does not say."""
        return None

    @classmethod
    def turns_keys(cls, params: Any) -> bool:
        """Keys may be seen from other positions than their own (Layout.farthest, Layout.closed): what is attended is
        not attended as full attention does."""
        return False

    @classmethod
    def reach(cls, params: Any, run: RunSizes) -> int:
        """Positions that the model's attention has to tell apart. No torch. Fewer than the run's tokens where keys are
        renumbered: such a run may be longer than what the model takes."""
        return run.prompt_tokens + 1 + run.max_new

    @classmethod
    def reads_itself(cls, params: Any) -> bool:
        """The prompt is read under attention of the method's own, which `reading` says; one that was read under full
        attention does not serve it."""
        return False

    @property
    def block(self) -> int:
        """Prompt tokens that go through the model at once, where what they attend depends on it; 0: as the run says."""
        return 0

    def reading(self, layer: int, keys: torch.Tensor, tokens: int) -> Reading | None:
        """What the last `tokens` prompt tokens that were put through attend, where the method `reads_itself`: keys
        [H_kv, m, D] of the m tokens so far, post-RoPE. Called once per layer and chunk, in order. None: full
        attention."""
        return None

    @abstractmethod
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        """Divide the device and place the prompt. Raises BudgetInfeasible with the smallest feasible bytes when it
        cannot fit."""

    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        """What the query heads of `layer` attend: q [Hq, D], post-RoPE. None: everything on the device as it is.

        Of a method that is `static_ready`, tensor operations of fixed shape only: no .item(), no host copies. A number
        that changes from step to step lies in a tensor that is written in place (in `decode_end`), not in a Python
        variable: a compiled or captured step would not see it change.
        """
        return None

    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The token of a decode step has been written, before `select` of the layer: keys, values [H_kv, D],
        post-RoPE."""

    def asked(self, layer: int, q: torch.Tensor) -> None:
        """The queries of a decode step, before its attention: q [Hq, D], post-RoPE. For what follows them without
        selecting by them."""

    @property
    def looks_ahead(self) -> bool:
        """`select` is called for every layer but the first while the layer before it runs, with q estimated from what
        that layer's attention is given (kvlens/engine/ahead.py), and what it asks for is brought behind that layer's
        back. False: with the layer's own q, when it is known."""
        return False

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        """What a step's attention of some KV heads came to, where the method `watches`: weights float32 [h, G, C], rows
        add up to 1, of slots with tokens at position int32 [h, C] (-1: none)."""

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | BagChange | None:
        """A step has ended; a block of the oldest tokens may leave the window, or a bag's tokens make room."""
        return None

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Tensors this method keeps on the device for KV purposes, by name: they count in the budget."""
        return {}

    def factor_form(self) -> FactorForm | None:
        """How the cold tier holds spans that are not raw; None: all are. Only kvlens/lab/gpu/static asks."""
        return None

    def note(self, name: str, values: torch.Tensor, layer: int | None = None, kv_head: int | None = None) -> None:
        """Write a vector [n] into the journal. The tensor is kept, so it must not be written again. Changes nothing
        else."""
        if not self.keeps_journal:
            return
        assert name in self.journal_names, f"{self.name} writes {name!r}, which its journal_names do not explain"
        self._journal.append(Note(name, values, layer, kv_head))

    def drain_journal(self) -> list[Note]:
        """What was noted since the last call."""
        notes, self._journal = self._journal, []
        return notes

    def refuse_below(self, needed: int) -> None:
        """Raises BudgetInfeasible when the budget is smaller than `needed` bytes, the least this run can do with."""
        context = self.context
        if context.budget_bytes is not None and context.budget_bytes < needed:
            raise BudgetInfeasible(self.name, context.budget_bytes, needed, context.full_kv_bytes)
