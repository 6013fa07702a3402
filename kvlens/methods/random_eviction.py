"""Random eviction: tokens drawn by chance, the control that a score has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, torch_seed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RandomEvictionParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)


class RandomEviction(PromptEviction):
    """Ranks tokens by numbers drawn evenly from [0, 1), anew for every layer and KV head, from the run's seed. The
    window stays, as in the methods it is compared with: what differs is the choice alone.
    """

    name = "random"
    title = "Random eviction"
    paper = "none: a control"
    summary = "drops prompt tokens once, when prefill ends: each KV head keeps the window and tokens drawn by chance"
    Parameters = RandomEvictionParameters
    needs = Needs()
    params: RandomEvictionParameters

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        import torch

        shape = self.context.shape
        # drawn on the host, so that the same tokens stay on every device
        drawn = torch.Generator().manual_seed(torch_seed(self.context.seed * shape.layers + layer))
        return torch.rand(shape.kv_heads, before, generator=drawn).to(prompt.keys.device)
