"""The arithmetic of a method: what preflight, forms and tables compute before anything is loaded. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlens.methods.segmenter import PromptFacts, RunSizes
    from kvlens.shape import KVShape
    from kvlens.spans import Span


class Sizing:
    """Class methods on parameters and sizes alone."""

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
