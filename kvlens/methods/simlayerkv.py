"""SimLayerKV: lazy layers, which attend the first and newest tokens, keep only these; the others keep all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters, Tokens, equal_shares
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SimLayerKVParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(1024, "newest prompt tokens that a lazy layer keeps", symbol="w_recent")
    sinks: int = param(4, "first tokens that a lazy layer keeps", symbol="w_initial")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.window < 1:
            raise ValueError("sinks must be at least 0 and window at least 1.")

    @property
    def least(self) -> int:
        return self.window + self.sinks

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The newest tokens of a lazy layer are a quarter of the tokens that the budget holds per layer, 1,024 at most
        (the paper's) and 8 at least, so that most of the budget is left for layers that keep all. Ours."""
        kept_count = tokens_within(shape, budget_bytes, prompt_tokens + max_new) - max_new
        return {"window": clamp(kept_count / 4, 8, 1024), "tokens": 0}


class SimLayerKV(PromptEviction):
    """A layer is lazy as far as its last prompt query attends the first `sinks` and the newest `window` tokens,
    averaged over its query heads. Lazy layers keep these tokens alone, the others all (paper sec. 4).

    Departures: the paper compares with a threshold of the model, so that the bytes follow from the text; here the
    budget says how many layers keep all, and the laziest do not. What is left beside whole layers goes to the least
    lazy of the others, as more of its newest tokens. The last query is the prompt's very last token's.
    """

    name = "simlayerkv"
    title = "SimLayerKV"
    paper = "Zhang et al., SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction, 2024"
    summary = (
        "drops prompt tokens once, when prefill ends: layers that attend the first and newest tokens keep these alone, "
        "the others keep all"
    )
    Parameters = SimLayerKVParameters
    presets = {"paper": {}, "demo": {"window": 16}}  # noqa: RUF012
    needs = Needs(queries=1, peek=True)
    one_set = True
    keeps_ends = True
    static_ready = False
    """a static step lays layers out alike"""
    journal_names = {  # noqa: RUF012
        "layer_laziness": "attention of the last prompt query to first and newest tokens, mean over heads, by layer",
        "layer_budget_tokens": "prompt tokens kept, window included, by layer",
    }
    params: SimLayerKVParameters

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        n, layers = self.context.prompt_tokens + self.last, self.context.shape.layers
        least = min(self.params.least, n)
        if prompt is None or total >= n * layers or total < least * layers:
            return equal_shares(total, layers)
        laziness = [self._laziness(prompt, layer) for layer in range(layers)]
        counts, spare = [least] * layers, total - least * layers
        for layer in sorted(range(layers), key=lambda index: laziness[index]):
            more = min(spare, n - least)
            counts[layer], spare = least + more, spare - more
        self.note("layer_laziness", torch.tensor(laziness))
        self.note("layer_budget_tokens", torch.tensor(counts, dtype=torch.float32))
        return [[count] for count in counts]

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        """Return the positions, the newest highest, behind the first tokens."""
        import torch

        places = torch.arange(end, device=prompt.keys.device).float()
        places[: self.params.sinks] += end
        return places[None]

    def _laziness(self, prompt: Prefilled, layer: int) -> float:
        from kvlens.methods.families import window_attention as window

        p, shape = self.params, self.context.shape
        peeked = prompt.peeked if p.peek else None
        queries, keys = window.observed(prompt, layer, range(shape.q_heads), shape.group, int(peeked is None), peeked)
        paid = window.paid(queries[:, -1:], keys).mean((0, 1))
        newest = max(len(paid) - p.window, p.sinks)
        return float(paid[: p.sinks].sum() + paid[newest:].sum())
