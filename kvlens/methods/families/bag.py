"""A bag of tokens per KV head: what is placed of the prompt in it, and the pages that its decoded tokens come to.

Shapes: L layers, H_kv KV heads, n prompt tokens that prefill covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.segmenter import PromptFacts
from kvlens.spans import Span, fixed_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Kept, Placement


class Bag(Method):
    """`params` has `sinks` and `page`."""

    family = "decode_eviction"
    params: Any
    role = "resident"
    """of tokens that are no sinks, one of kvlens.rows.ROLES"""
    _named: int
    """positions below it belong to a span"""

    @classmethod
    def sinks(cls, params: Any, prompt_tokens: int) -> int:
        """First tokens that are never evicted."""
        return min(params.sinks, prompt_tokens)

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        sinks = cls.sinks(params, n)
        sink_spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are kept for ever.")] if sinks else []
        return [*sink_spans, *fixed_chunks(sinks, n, params.page, kind="page")]

    def _place(self, mask: torch.Tensor, kept: Kept) -> Placement:
        from kvlens.memory.placement import Placement

        spans = self.segments(self.params, self.context, ())
        rows = mask.flatten(0, 1).cpu()
        states = []
        for span in spans:
            counts = rows[:, span.tok_start : span.tok_end].sum(1)
            whole = bool((counts == len(span)).all())
            states.append("resident" if whole else "partial" if int(counts.sum()) else "evicted")
        return Placement(spans, states, ["sink" if span.kind == "sink" else self.role for span in spans], kept)

    def _open(self, position: int) -> Placement | None:
        """Decoded tokens become a page of their own when there are enough of them that are no longer recent."""
        import torch

        from kvlens.memory.placement import Kept, Placement

        page, start = self.params.page, self._named
        if position + 1 - start < page:
            return None
        self._named = start + page
        span = Span(start, start + page, "page", f"The next {page} decoded tokens.")
        nothing = Kept.everywhere(torch.empty(0, dtype=torch.long, device=self.context.device))
        return Placement([span], ["resident"], [self.role], nothing)
