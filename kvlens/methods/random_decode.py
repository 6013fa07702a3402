"""Random attention: decoded tokens leave by chance, the control that a decode eviction has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RandomDecodeParameters(DecodeEvictionParameters):
    """Lengths are in tokens."""

    sinks: int = param(4, "first tokens, never evicted", ours=True)
    recent: int = param(8, "newest tokens, not evicted; 0: half of the bag", ours=True)
    keep_prompt: bool = param(
        True, "where the bag holds the whole prompt, its tokens leave only when no decoded token can", ours=True
    )


class RandomDecode(DecodeEviction):
    """When the bag is full, draws one token of each KV head for each one that comes, and it goes for good. Every token
    that is not protected is equally likely to go at every step.

    Departures: none; it is a control. A prompt larger than the bag is cut to tokens drawn by chance too, and decoded
    tokens are then no more likely to go than those of the prompt.
    """

    name = "random_decode"
    title = "Random attention"
    paper = "none: a control for decode eviction"
    summary = "drops, for every token that comes, one drawn by chance"
    Parameters = RandomDecodeParameters
    needs = Needs()
    params: RandomDecodeParameters

    def __init__(self, params: RandomDecodeParameters, context: RunContext) -> None:
        import torch

        super().__init__(params, context)
        self._drawn = torch.Generator().manual_seed(context.seed)

    def _draw(self, *size: int) -> torch.Tensor:
        """Return even numbers, drawn on the host, so that the same tokens go on every device."""
        import torch

        return torch.rand(size, generator=self._drawn).to(self.context.device)

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        return self._draw(*prompt.keys.shape[1:3])

    def entered(self, positions: torch.Tensor, prompt: Prefilled) -> None:
        is_whole = int((positions[0, 0] >= 0).sum()) == self.context.prompt_tokens
        self._prompt_stays = self.params.keep_prompt and is_whole

    def priority(self) -> torch.Tensor:
        lots = self._draw(*self._position.shape)
        if not self._prompt_stays:
            return lots
        return lots + (self._position < self.context.prompt_tokens)
