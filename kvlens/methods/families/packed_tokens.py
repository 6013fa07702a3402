"""Quantisation: every token stays on the device, in few bits once it has left the window.

A method of this family says its form (`form`): how many bits, and how they are made. Keys leave the window in blocks of
`residual` tokens, values one by one; the memory packs, restores and counts them (kvlens/memory/packed.py).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlens.finer import by_head, parse_finer
from kvlens.methods.base import Method
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.quantised.form import Quantised
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlens.memory.placement import Placement


class PackedTokens(Method):
    """Base of the family. `params` has `group`, tokens of a span, `residual`, a multiple of it, and, where
    its form is codes, `finer` (kvlens/finer.py)."""

    family = "quantisation"
    exact_without_budget = False
    params: Any

    @classmethod
    @abstractmethod
    def form(cls, params: Any, shape: KVShape, positions: int) -> Quantised:
        """Return how tokens are packed in a run of so many positions."""

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return cls._layout(params, shape, prompt_tokens, max_new).bytes(shape)

    @classmethod
    def raised(cls, params: Any, finer: Any, context: RunContext) -> int:
        """Return by how many bytes the budget has to be raised for parameters `finer`."""
        return sum(
            sign * cls.floor_bytes(each, context.shape, context.prompt_tokens, context.max_new)
            for sign, each in ((1, finer), (-1, params))
        )

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        return fixed_chunks(0, n - n % params.residual, params.group, kind="group")

    @classmethod
    def _layout(cls, params: Any, shape: KVShape, n: int, max_new: int) -> Layout:
        """A ring for the residual and the step's own token; all else is packed."""
        spans, window_from = 1 + -(-(n + max_new) // params.group), n - n % params.residual
        form = cls.form(params, shape, n + max_new)
        if form.widths:
            form = replace(form, finer=by_head(parse_finer(params.finer), shape, form.widths))
        return Layout(Zones(0, 0, 0, params.residual + 1), spans, window_from=window_from, quantised=form)

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        context = self.context
        layout = self._layout(self.params, context.shape, context.prompt_tokens, context.max_new)
        self.refuse_below(layout.bytes(context.shape))
        self._packed = layout.window_from
        return layout, self._place(self.segments(self.params, context, ()))

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        start, until, p = self._packed, end.position + 1, self.params
        if until - start < p.residual:
            return None
        self._packed = until
        return WindowLeave(start, until, self._place(fixed_chunks(start, until, p.group, kind="group")))

    def _place(self, spans: list[Span]) -> Placement:
        import torch

        from kvlens.memory.placement import Kept, Placement

        packed = ["quantised"] * len(spans)
        nothing = Kept.everywhere(torch.empty(0, dtype=torch.long, device=self.context.device))
        return Placement(spans, packed, packed, nothing)
