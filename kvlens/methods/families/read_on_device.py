"""Every token stays on the device, and a step reads few of them: the part that methods of this kind share.

Pages, which leave the window as they fill and name what is logged, layout and placement are here. Shapes: H_kv KV
heads, n tokens so far, S span ids, p tokens a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement


class ReadOnDevice(Method):
    """Base; `params.page` is the tokens of a page."""

    family = "token_retrieval"
    keeps_all = True
    exact_without_budget = False
    params: Any

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, tokens: int) -> int:
        """Return the device bytes of what the method itself holds for `tokens` tokens, prompt and decoded."""
        return 0

    def begin(self, prompt: Prefilled) -> None:
        """Take what the method holds for the whole run."""

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return cls._layout(params, shape, prompt_tokens, max_new).bytes(shape) + cls.own_bytes(
            params, shape, prompt_tokens + max_new
        )

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        return fixed_chunks(0, n - n % params.page, params.page, kind="page")

    @classmethod
    def _layout(cls, params: Any, shape: KVShape, n: int, max_new: int) -> Layout:
        whole = n - n % params.page
        spans = (n + max_new) // params.page + 1
        zones = Zones(whole, 0, 0, n - whole + max_new)
        return Layout(zones, spans, window_from=whole, dense=tuple(range(shape.layers)))

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement

        context, p, shape, n = self.context, self.params, self.context.shape, self.context.prompt_tokens
        self.refuse_below(self.floor_bytes(p, shape, n, context.max_new))
        self._places, self._pages = n + context.max_new, n // p.page
        self._none = torch.full((shape.kv_heads, 0), -1, dtype=torch.long, device=context.device)
        self.begin(prompt)
        spans = self.segments(p, context, ())
        resident = ["resident"] * len(spans)
        placement = Kept.everywhere(torch.arange(len(spans) * p.page, device=context.device))
        return self._layout(p, shape, n, context.max_new), Placement(spans, resident, resident, placement)

    def by_span(self, of_tokens: torch.Tensor, nothing: float) -> torch.Tensor:
        """Return [..., n] of tokens as [..., S, p] of span ids: the window's and those not yet in use hold
        `nothing`."""
        import torch

        page, most = self.params.page, self._places // self.params.page
        paged = of_tokens[..., : self._pages * page].unflatten(-1, (self._pages, page))
        return torch.nn.functional.pad(paged, (0, 0, 1, most - self._pages), value=nothing)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        from kvlens.memory.placement import Kept, Placement

        page = self.params.page
        if (end.position + 1) % page:
            return None
        start = end.position + 1 - page
        self._pages += 1
        placement = Kept.everywhere(torch.arange(start, start + page, device=self._none.device))
        span = Span(start, start + page, "page", "A full page.")
        return WindowLeave(start, start + page, Placement([span], ["resident"], ["resident"], placement))
