"""StreamingLLM: attention sinks and a sliding window; everything between is gone for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.memory.layout import Layout, Zones
from kvlens.methods.base import Method, Prefilled, PromptFacts, param
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlens.memory.placement import Placement


@dataclass(frozen=True)
class StreamingParameters:
    sinks: int = param(4, "tokens at the start that are kept for ever", symbol="attention sinks (sec. 3.2)")
    page: int = param(16, "tokens per page: pages are the spans that evictions are logged for", ours=True)

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.page < 1:
            raise ValueError("sinks must be at least 0 and page at least 1.")


class StreamingLLM(Method):
    """Keeps `sinks` first tokens and as many newest tokens as the budget holds, evicting the oldest at every step.

    Keys stay at the positions they were cached with (post-RoPE); the paper's streaming evaluation assigns positions
    inside the cache instead. Inside the trained context both keep the same tokens.
    """

    name = "streaming_llm"
    title = "StreamingLLM"
    paper = "Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024"
    summary = "keeps the first tokens (sinks) and a sliding window of the newest; evicts the rest, never to return"
    Parameters = StreamingParameters

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return _layout(params, prompt_tokens, 1, prompt_tokens).bytes(shape)

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        sinks, window = min(params.sinks, prompt.prompt_tokens), _window(params, prompt)
        spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are kept for ever.")] if sinks else []
        why = f"Older than the newest {window} tokens when decoding began: evicted."
        pages = fixed_chunks(sinks, max(sinks, prompt.prompt_tokens - window), params.page, kind="page")
        return [*spans, *(Span(s.tok_start, s.tok_end, s.kind, why) for s in pages)]

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.kept import Kept
        from kvlens.memory.placement import Placement

        context, n, p = self.context, self.context.prompt_tokens, self.params
        self.refuse_below(self.floor_bytes(p, context.shape, n, context.max_new))
        spans, window = self.segments(p, context, ()), _window(p, context)
        first = spans[-1].tok_end if spans else max(0, n - window)
        states = ["resident" if span.kind == "sink" else "evicted" for span in spans]
        kept = torch.arange(min(p.sinks, n), device=context.device)
        return _layout(p, n, window, first), Placement(spans, states, ["sink"] * len(states), Kept.everywhere(kept))


def _window(p: StreamingParameters, prompt: PromptFacts) -> int:
    """Newest tokens that the budget holds beside the sinks."""
    n = prompt.prompt_tokens
    most = n - min(p.sinks, n) + prompt.max_new
    if prompt.budget_bytes is None:
        return most
    floor = _layout(p, n, 1, n).bytes(prompt.shape)
    per_token = _layout(p, n, 2, n).bytes(prompt.shape) - floor
    return max(1, min(most, 1 + (prompt.budget_bytes - floor) // per_token))


def _layout(p: StreamingParameters, n: int, window: int, first: int) -> Layout:
    return Layout(Zones(min(p.sinks, n), 0, 0, window), n // p.page + 3, window_from=first, window_evicts=True)
