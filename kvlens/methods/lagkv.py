"""LagKV: tokens that differ from the partition after theirs, by keys and values alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LagKVParameters(PromptEvictionParameters):
    """Lengths are in tokens. Defaults are those of the paper's main experiments."""

    window: int = param(0, "last prompt tokens, kept without a comparison, beside the last partitions")
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    sinks: int = param(16, "first tokens: always kept", symbol="S")
    lag: int = param(128, "tokens of a partition; each partition is measured by the next", symbol="L")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.lag < 2:
            raise ValueError("sinks must be at least 0 and lag at least 2.")

    @property
    def least(self) -> int:
        return self.window + self.sinks + 2 * self.lag

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The partition is an eighth of the kept tokens, 128 at most (the paper's, for prompts of 4,096 and more) and 8
        at least; the last one and the rest behind it stay whole, so that three quarters of the budget are left for a
        choice. Sinks are an eighth of the partition, as 16 of 128. Ours."""
        kept_tokens = tokens_within(shape, budget_bytes, prompt_tokens + max_new) - max_new
        lag = clamp(kept_tokens / 8, 8, 128)
        return {"lag": lag, "sinks": clamp(lag / 8, 1, 16), "tokens": 0}


class LagKV(PromptEviction):
    """Cuts the prompt behind its sinks into partitions of `lag` tokens. Every channel of a partition's keys is scaled
    by the range of that channel in the next partition; a token's score is the standard deviation over its scaled
    channels, softmax over the partition, and the same of values; both are averaged (paper sec. 3, eq. 2 to 6). Each
    partition keeps its best tokens. The last whole partition and the tokens behind it have no next one and stay. No
    query is looked at.

    Departures: only the prompt is compressed, once; the authors compress decoded tokens as well, whenever two more
    partitions are there. A channel that is constant in the next partition counts as 0. Partitions keep equally many but
    for one token, which the first partitions have more. A prompt of fewer than two partitions keeps its newest tokens.
    """

    name = "lagkv"
    title = "LagKV"
    paper = "Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: each partition keeps the tokens whose channels, scaled by their "
        "range in the next partition, spread most"
    )
    Parameters = LagKVParameters
    presets = {"paper": {}, "demo": {"sinks": 4, "lag": 16}}  # noqa: RUF012
    needs = Needs()
    partial_ranking = True
    ranks_parts = True
    params: LagKVParameters

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch

        p = self.params
        keys, values = prompt.keys[layer, :, :end], prompt.values[layer, :, :end]
        parts = max(end - p.sinks, 0) // p.lag
        scores = torch.full(keys.shape[:2], torch.nan, device=keys.device)
        if parts < 2:
            scores[:, p.sinks :] = torch.arange(end - p.sinks, device=keys.device).float()
            return scores
        partitions = slice(p.sinks, p.sinks + parts * p.lag)
        differing = [relative(x[:, partitions].float().unflatten(1, (parts, p.lag))) for x in (keys, values)]
        mean = (differing[0] + differing[1]) / 2
        places = torch.arange(p.lag - 1, -1, -1, device=keys.device).float().expand(mean.shape)
        rank = torch.empty_like(mean).scatter_(2, mean.argsort(dim=-1, descending=True, stable=True), places)
        scores[:, p.sinks : p.sinks + (parts - 1) * p.lag] = rank.flatten(1) / p.lag
        return scores


def relative(parts: torch.Tensor) -> torch.Tensor:
    """Return how much each token of a partition spreads over its channels, scaled by the next partition: parts float32
    [H_kv, P, lag, D] -> shares of the partition [H_kv, P - 1, lag]."""
    low, high = parts[:, 1:].amin(2, keepdim=True), parts[:, 1:].amax(2, keepdim=True)
    width = high - low
    scaled = ((parts[:, :-1] - low) / width).masked_fill(width == 0, 0.0)
    return scaled.std(-1).softmax(-1)
