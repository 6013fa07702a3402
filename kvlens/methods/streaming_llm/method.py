"""StreamingLLM: attention sinks and a sliding window; everything between is gone for good."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, Reading, RunContext
from kvlens.methods.segmenter import RunSizes

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement
    from kvlens.tiers.layout import Layout


@dataclass(frozen=True)
class StreamingParameters(DecodeEvictionParameters):
    """Lengths are in tokens."""

    sinks: int = param(4, "tokens at the start that are kept for ever", symbol="attention sinks (sec. 3.2)")
    recent: int = param(1, "newest tokens, not evicted: the window is all of the bag beside the sinks", ours=True)
    positions: str = param(
        "true",
        "where keys are seen: at their positions in the text, the prompt read under full attention; or numbered inside "
        "the cache, as published, the prompt read through that cache too, so that a run may be longer than the model's "
        "context",
        choices=("true", "cache"),
        ours=True,
    )


class StreamingLLM(DecodeEviction):
    """Keeps `sinks` first tokens and as many newest tokens as the budget holds, evicting the oldest at every step.

    positions=cache is the published method (sec. 3.2): every token, of the prompt too, attends the sinks and the newest
    tokens, itself the newest of them, and distances are those inside the cache, [0, 1, ..., P - 1] for P places. The
    window lies side by side anyway, so that only the sinks are turned: they lie directly before it. With positions=true
    the prompt is read under full attention and keys stay at the positions they were cached with.

    Where paper and code differ: the paper evicts with every token, as the code's perplexity runs do; its chat makes
    room for prompt and answer before it reads a turn, and evicts nothing inside one. Here as in the paper.

    Departures: in paper and code the newest token comes on top of the cache that it attends, here it is one of the P
    places (4 + 2,044 there are 2,049 here). They keep keys without positions and turn all of them at every step; here
    keys are kept turned, and a step turns copies of the sinks back and on, which is the same up to rounding.
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

    def __init__(self, params: StreamingParameters, context: RunContext) -> None:
        super().__init__(params, context)
        if self._renumbers(params):
            context.rotary("streaming_llm with positions=cache")

    @staticmethod
    def _renumbers(params: StreamingParameters) -> bool:
        return params.positions == "cache"

    @classmethod
    def turns_keys(cls, params: StreamingParameters) -> bool:
        return cls._renumbers(params)

    @classmethod
    def needs_with(cls, params: StreamingParameters) -> Needs:
        return Needs(reading=cls._renumbers(params))

    @classmethod
    def reach(cls, params: StreamingParameters, run: RunSizes) -> int:
        return cls.places(params, run) if cls._renumbers(params) else super().reach(params, run)

    def reading(self, layer: int, keys: torch.Tensor, tokens: int) -> Reading | None:
        import torch

        places, n = self.places(self.params, self.context), keys.shape[1]
        if n <= places:
            return None
        every = torch.arange(n, device=keys.device)
        new_positions = every[n - tokens :, None]
        window = every > new_positions - (places - self.params.sinks)
        mask = (every <= new_positions) & (window | (every < self.params.sinks))
        return Reading(mask[None], self.params.sinks, (new_positions[:, 0] + 1 - places).clamp(min=0))

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        layout, placement = super().prefill_end(prompt)
        return replace(layout, closed=self._renumbers(self.params)), placement

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        import torch

        shape, n = self.context.shape, self.context.prompt_tokens
        return torch.arange(n, dtype=torch.float32, device=prompt.keys.device).expand(shape.kv_heads, -1)

    def priority(self) -> torch.Tensor:
        return self._position.float()
