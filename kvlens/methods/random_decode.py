"""Random attention: decoded tokens leave by chance, the control that a decode eviction has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RandomDecodeParameters(DecodeEvictionParameters):
    """Lengths are in tokens."""

    sinks: int = param(4, "first tokens, never evicted", ours=True)
    recent: int = param(8, "newest tokens, not evicted; 0: half of the bag", ours=True)
    keep_prompt: bool = param(
        True, "tokens of the prompt that entered the bag leave only when no decoded token can", ours=True
    )


class RandomDecode(DecodeEviction):
    """Gives every token an even random number when it enters the bag; when the bag is full, the token with the lowest
    number goes for good for each one that comes. So each token that is not protected is equally likely to go.

    Departures: none; it is a control. A prompt larger than the bag is cut to tokens drawn by chance too.
    """

    name = "random_decode"
    title = "Random attention"
    paper = "none: a control for decode eviction"
    summary = "drops, for every token that comes, a decoded token drawn by chance"
    Parameters = RandomDecodeParameters
    needs = Needs()
    params: RandomDecodeParameters

    def __init__(self, params: RandomDecodeParameters, context: RunContext) -> None:
        import torch

        super().__init__(params, context)
        self._drawn = torch.Generator().manual_seed(context.seed)

    @classmethod
    def own_bytes(cls, params: RandomDecodeParameters, shape: KVShape, places: int) -> int:
        return shape.layers * shape.kv_heads * places * 4

    def _draw(self, *size: int) -> torch.Tensor:
        """Return even numbers, drawn on the host, so that the same tokens go on every device."""
        import torch

        return torch.rand(size, generator=self._drawn).to(self.context.device)

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        return self._draw(*prompt.keys.shape[1:3])

    def entered(self, positions: torch.Tensor, prompt: Prefilled) -> None:
        self._lots = self._draw(*positions.shape) + ((positions >= 0).float() if self.params.keep_prompt else 0.0)

    def replaced(self, places: torch.Tensor) -> None:
        self._lots.scatter_(-1, places[..., None], self._draw(*places.shape)[..., None])

    def priority(self) -> torch.Tensor:
        return self._lots

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return super().held() | ({"lots": (self._lots,)} if hasattr(self, "_lots") else {})
