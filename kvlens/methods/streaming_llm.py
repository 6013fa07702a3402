"""StreamingLLM: attention sinks and a sliding window; everything between is gone for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.given import Prefilled
from kvlens.methods.parameters import param

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StreamingParameters(DecodeEvictionParameters):
    """Lengths are in tokens."""

    sinks: int = param(4, "tokens at the start that are kept for ever", symbol="attention sinks (sec. 3.2)")
    recent: int = param(1, "newest tokens, not evicted: the window is all of the bag beside the sinks", ours=True)


class StreamingLLM(DecodeEviction):
    """Keeps `sinks` first tokens and as many newest tokens as the budget holds, evicting the oldest at every step.

    Keys stay at the positions they were cached with (post-RoPE); the paper's streaming evaluation assigns positions
    inside the cache instead. Inside the trained context both keep the same tokens.
    """

    name = "streaming_llm"
    title = "StreamingLLM"
    paper = "Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024"
    summary = "keeps the first tokens (sinks) and a sliding window of the newest; evicts the rest, never to return"
    Parameters = StreamingParameters
    static_ready = True
    ranks = False
    role = "window"
    params: StreamingParameters

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        import torch

        shape, n = self.context.shape, self.context.prompt_tokens
        return torch.arange(n, dtype=torch.float32, device=prompt.keys.device).expand(shape.kv_heads, -1)

    def priority(self) -> torch.Tensor:
        return self._position.float()
