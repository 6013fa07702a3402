"""CurDKV: long keys and long values, within a stretch of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, torch_seed

if TYPE_CHECKING:
    import torch

TIES = 2**16
"""steps that a score is rounded to: the same token read twice has keys of one length but for the last bits, whose order
would hang on how the prompt was read"""


@dataclass(frozen=True)
class CurDKVParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(0, "last prompt tokens, kept without a comparison; the paper protects none")
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    sinks: int = param(4, "first tokens: always kept")
    stretch: int = param(
        16, "neighbours whose squared lengths are shares of one sum; 0: those of all tokens", ours=True
    )
    leverage: str = param("product", "which squared lengths rank a token", choices=("product", "mean", "key", "value"))
    projection: int = param(
        0, "random directions that keys and values are projected on first (20 in the paper); 0: none", symbol="r"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.sinks, self.stretch, self.projection) < 0:
            raise ValueError("sinks, stretch and projection must be at least 0.")

    @property
    def least(self) -> int:
        return self.window + self.sinks + 1


class CurDKV(PromptEviction):
    """Approximates the leverage of a token in a CUR decomposition of keys and of values by its squared length, as a
    share of its stretch's sum; the score is the product of both shares (paper sec. 3, Algorithm 1). No query is looked
    at, so that what is kept does not depend on the question.

    Departures: without `projection` lengths are exact, where the paper projects on Gaussian directions to save
    time; the run's seed draws them. Shares are of 16 neighbours, as in kvpress; `stretch=0` takes all tokens. The
    last stretch may be shorter: its sum is over the tokens it has. Scores are rounded to 16 bits, so that equal
    tokens tie and the earlier one stays. A layer's KV heads keep equally many; the paper's adaptive form divides as
    adakv:curdkv does.
    """

    name = "curdkv"
    title = "CurDKV"
    paper = "Sengupta et al., Value-Guided KV Compression for LLMs via Approximated CUR Decomposition, NeurIPS 2025"
    summary = "drops prompt tokens once, when prefill ends: each KV head keeps tokens with long keys and long values"
    Parameters = CurDKVParameters
    presets = {"paper": {}, "projected": {"projection": 20}}  # noqa: RUF012
    needs = Needs()
    partial_ranking = True
    params: CurDKVParameters

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch

        p = self.params
        keys, values = (self._shares(x[layer].float(), layer)[:, :end] for x in (prompt.keys, prompt.values))
        scores: torch.Tensor = {
            "product": lambda: keys * values,
            "mean": lambda: (keys + values) / 2,
            "key": lambda: keys.clone(),
            "value": lambda: values.clone(),
        }[p.leverage]()
        fraction, exponent = torch.frexp(scores / scores.sum(-1, keepdim=True).clamp(min=1e-30))
        scores = torch.ldexp((fraction * TIES).round() / TIES, exponent)
        scores[:, : p.sinks] = torch.nan
        return scores

    def _shares(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        """Return squared lengths as shares of their stretch's sum: states float32 [H_kv, n, D] -> [H_kv, n]."""
        import torch
        import torch.nn.functional as F

        p = self.params
        if p.projection:
            drawn = torch.Generator().manual_seed(torch_seed(self.context.seed * self.context.shape.layers + layer))
            axes = torch.randn(states.shape[-1], p.projection, generator=drawn) / p.projection**0.5
            states = states @ axes.to(states.device)
        squares = states.square().sum(-1)
        n, size = squares.shape[1], p.stretch or squares.shape[1]
        stretches = F.pad(squares, (0, -n % size)).unflatten(1, (-1, size))
        return (stretches / stretches.sum(-1, keepdim=True).clamp(min=1e-30)).flatten(1)[:, :n]
