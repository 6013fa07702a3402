"""StreamingLLM: attention sinks and a sliding window; everything between is gone for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.layout import Layout, Zones
from kvlens.methods.base import Method, Prefilled, param
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks

if TYPE_CHECKING:
    from kvlens.memory import Placement


@dataclass(frozen=True)
class StreamingParameters:
    sinks: int = param(4, "tokens at the start that are kept for ever", symbol="attention sinks (sec. 3.2)")
    page: int = param(16, "tokens per page: pages are the spans that evictions are logged for", ours=True)

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.page < 1:
            raise ValueError("sinks must be at least 0 and page at least 1.")


class StreamingLLM(Method):
    """Keeps `sinks` first tokens and as many newest tokens as the budget holds, evicting the oldest at every step.

    Keys stay at the positions they were cached with (post-RoPE); the paper's streaming evaluation assigns positions inside the
    cache instead. Inside the trained context both keep the same tokens.
    """

    name = "streaming_llm"
    title = "StreamingLLM"
    paper = "Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024"
    summary = "keeps the first tokens (sinks) and a sliding window of the newest; evicts the rest, never to return"
    Parameters = StreamingParameters

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return _layout(params, prompt_tokens, 1, prompt_tokens).bytes(shape)

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory import Placement

        context, n, p = self.context, self.context.prompt_tokens, self.params
        sinks = min(p.sinks, n)
        window = n - sinks + context.max_new
        if context.budget_bytes is not None:
            floor = self.floor_bytes(p, context.shape, n, context.max_new)
            per_token = _layout(p, n, 2, n).bytes(context.shape) - floor
            self.refuse_below(floor)
            window = min(window, 1 + (context.budget_bytes - floor) // per_token)
        first = max(sinks, n - window)
        spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are kept for ever.")] if sinks else []
        why = f"Older than the newest {window} tokens when decoding began: evicted."
        evicted = [Span(s.tok_start, s.tok_end, s.kind, why) for s in fixed_chunks(sinks, first, p.page, kind="page")]
        states = ["resident"] * len(spans) + ["evicted"] * len(evicted)
        kept = torch.arange(sinks, device=context.device)
        return _layout(p, n, window, first), Placement([*spans, *evicted], states, ["sink"] * len(states), kept)


def _layout(p: StreamingParameters, n: int, window: int, first: int) -> Layout:
    return Layout(Zones(min(p.sinks, n), 0, 0, window), n // p.page + 3, window_from=first, window_evicts=True)
