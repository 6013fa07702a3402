"""A KV-cache method: its description, its parameters, its needs, and the hooks that the engine calls.

A method is one file with one class, and one line in kvlens/methods/__init__.py (or an entry point `kvlens.methods` in a
package of the user's own). A hook returns what the method wants; the memory moves, counts and refuses. Method files
import torch inside their hooks only, so that forms and listings need no torch; tensor mathematics belongs in kernels/
or in a module beside the method.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any, ClassVar

from kvlens.budget import BudgetInfeasible
from kvlens.decisions import Decided
from kvlens.methods.faults import HookChecks
from kvlens.methods.hooks import FactorForm, Lifecycle, Needs, Note, Placing, Selecting
from kvlens.methods.wrappers import Lending

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.methods.modelfigures import Calibration
    from kvlens.methods.run_inputs import RunContext
    from kvlens.methods.segmenter import PromptFacts, RunSizes, Segmenter
    from kvlens.methods.statements import Statement
    from kvlens.shape import KVShape
    from kvlens.spans import Span

FAMILIES = {
    "reference": "all KV, all attended",
    "prompt_eviction": "scores the prompt once and drops the rest for good",
    "decode_eviction": "drops for good while decoding",
    "page_retrieval": "ranks pages of tokens at every step, or when it is unsure",
    "token_retrieval": "reads single tokens, chosen at every step",
    "span_retrieval": "reads spans as summaries, low-rank factors or tokens",
    "quantisation": "keeps every token, in fewer bits, channels or directions",
    "other": "none of these",
}
"""family -> what its methods do; colours and lists of methods go by it"""


class Sizing:
    """The arithmetic of a method: what preflight, forms and tables compute before anything is loaded. Class methods on
    parameters and sizes alone."""

    name: ClassVar[str]
    exact_without_budget: ClassVar[bool] = True
    """with no budget limit it attends everything exactly, so it equals FullKV"""
    floor_is_exact: ClassVar[bool] = True
    """`floor_bytes` is what `prefill_end` will ask for; False: an estimate, since it depends on the text"""
    keeps_all: ClassVar[bool] = False
    """the KV of every token stays on the device: no budget below full KV is feasible, and the default is no limit"""

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """Estimate the least device bytes with which the method can decode such a prompt."""
        raise NotImplementedError(cls.name)

    @classmethod
    def likely_bytes(
        cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None
    ) -> int:
        """Estimate the device bytes that such a prompt needs at a budget; parameters are chosen by this. It differs
        from the floor where a larger budget asks for more. None: no limit."""
        return cls.floor_bytes(params, shape, prompt_tokens, max_new)

    @classmethod
    def bound_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """Return the device bytes below which no text of that length can be decoded: a run below them is refused before
        anything is loaded. 0: unknown."""
        return cls.floor_bytes(params, shape, prompt_tokens, max_new) if cls.floor_is_exact else 0

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span] | None:
        """Return the spans that `prefill_end` cuts, up to the beginning of the window: a page compares the cuts of
        several methods without running them. surprisal [prompt_tokens]: nats, NaN where there is none. None: this
        method does not say."""
        return None

    @classmethod
    def turns_keys(cls, params: Any) -> bool:
        """Return True if keys may be seen from other positions than their own (Layout.farthest, Layout.closed): the
        attended tokens are then not attended as full attention does."""
        return False

    @classmethod
    def reach(cls, params: Any, run: RunSizes) -> int:
        """Return the number of positions that the model's attention has to tell apart. It is smaller than the run's
        tokens where keys are renumbered: such a run may be longer than the model's context."""
        return run.prompt_tokens + 1 + run.max_new


class Method(Sizing, Placing, Selecting, Lifecycle, ABC):
    """Base of all methods: arithmetic (sizing.py), three groups of hooks (hooks.py), one declaration of needs.

    One object lives for one run. It holds its own index tensors and announces them in `held`.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    """citation, or what the baseline is"""
    summary: ClassVar[str]
    """one sentence: what it keeps, drops and fetches"""
    family: ClassVar[str] = "other"
    """one of FAMILIES"""
    benchmark: ClassVar[str] = ""
    """the benchmark whose settings the defaults are, as kvlens.studies.papers names it; '': not recorded"""
    Parameters: ClassVar[type]
    """frozen dataclass whose fields are made with `param`"""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    needs: ClassVar[Needs] = Needs()
    """what the engine keeps or computes for it"""
    segmenters: ClassVar[tuple[Segmenter, ...]] = ()
    """its ways to cut a prompt, for the Spans page"""
    loses_at: ClassVar[tuple[str, str]] = ("multikey", "10%")
    """(task, budget) at which it loses answers of the demo model at 2048 tokens, where `kvlens bench explain` begins"""
    calibrations: ClassVar[tuple[Calibration, ...]] = ()
    """figures of the model that it needs; they come in the context"""
    lends: ClassVar[Lending] = Lending()
    """parts of it that a composed name joins with other methods (kvlens/methods/composition.py)"""
    statements: ClassVar[tuple[Statement, ...]] = ()
    """what its paper says of it, as comparisons that `kvlens bench claims` makes"""
    untrained: ClassVar[dict[str, Any]] = {}
    """parameters with which it runs on a model that nothing was trained or calibrated for"""
    stand_ins: ClassVar[dict[str, str]] = {}
    """parameter of `untrained` -> what the part is called while it has that value (kvlens/methods/naming.py);
    'uncalibrated PARAMETER' where left out"""
    static_ready: ClassVar[bool] = False
    """`select` keeps to fixed shapes, so that kvlens.lab.gpu.static can compile or capture a step of it"""
    selects_between_steps: ClassVar[bool] = False
    """`select` looks at neither query nor layer: what it answers changes in `decode_end` only"""
    journal_names: ClassVar[dict[str, str]] = {}
    """what `note` may be called with: name (with its unit) -> one sentence on what the values are and how they are
    indexed"""

    def __init__(self, params: Any, context: RunContext) -> None:
        self.params, self.context = params, context
        self._journal: list[Note] = []
        self._decided: list[Decided] = []
        self.keeps_journal = True
        """False: notes are dropped, and what is for the record alone is not computed: nothing is recorded"""
        self.in_graph = False
        """True: every operation is a launch in a graph of the device, so few are better. Runs of an engine have False,
        recorded or not, so that both choose by the same operations"""
        self.checks = HookChecks(self.name)
        """the checks of what a family's hooks return"""

    @classmethod
    def needs_with(cls, params: Any) -> Needs:
        """Return `needs`, changed where parameters decide."""
        return cls.needs

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

    def decide(
        self, kind: str, candidates: int, selected: int, score: float = float("nan"), cut: float = float("nan")
    ) -> None:
        """Record a decision for all layers and heads that `select` does not show. score, cut: what decided, and what it
        was compared with; NaN: none. Changes nothing else."""
        if self.keeps_journal:
            self._decided.append(Decided(kind, candidates, selected, score, cut))

    def drain_decided(self) -> list[Decided]:
        """Return the decisions since the last call."""
        decided, self._decided = self._decided, []
        return decided

    def refuse_below(self, needed: int) -> None:
        """Raises BudgetInfeasible when the budget is smaller than `needed` bytes, the least this run can do with."""
        context = self.context
        if context.budget_bytes is not None and context.budget_bytes < needed:
            raise BudgetInfeasible(self.name, context.budget_bytes, needed, context.full_kv_bytes)


def own_method(method: type[Method]) -> bool:
    """Return whether kvlens ships the method, all parts of a composed one. Others get copies of a prompt that several
    runs share: a hook that writes in it is refused, and must not change it for the runs that follow."""
    foreign = (part for part in method.__mro__ if not part.__module__.startswith("kvlens.methods."))
    return all(part.__module__ in ("abc", "builtins", "typing") for part in foreign)
