"""H2O: heavy hitters, the tokens that have received most attention so far, and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class H2OParameters(DecodeEvictionParameters):
    """Lengths are in tokens. Heavy and recent tokens share the bag in equal halves, as in the paper's experiments."""

    group: str = param(
        "sum",
        "how the query heads of a KV head, which store one copy, agree",
        choices=("sum", "mean", "max"),
        ours=True,
    )


class H2O(DecodeEviction):
    """Adds up, per KV head, the attention that each token has received from all queries so far, those of the prompt
    included; keeps the newest tokens and, of the others, those with the largest sums (paper sec. 4.1, Algorithm 1).
    When the bag is full, the token with the smallest sum goes for good for each one that comes; survivors keep their
    sums.

    Departures: the paper keeps a set per query head, G times the bytes; here a KV head's group agrees on one (`group`).
    Sums are float32. The prompt's attention is summed in blocks of queries, never as a matrix of n x n.
    """

    name = "h2o"
    title = "H2O"
    paper = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs, NeurIPS 2023"
    summary = "keeps the newest tokens and those that received most attention so far; one goes for every one that comes"
    Parameters = H2OParameters
    presets = {"paper": {}}  # noqa: RUF012
    needs = Needs(received=True, weights=True)
    params: H2OParameters

    @classmethod
    def own_bytes(cls, params: H2OParameters, shape: KVShape, places: int) -> int:
        return shape.layers * shape.kv_heads * places * 4

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        from kvlens.methods.families.window_attention import grouped

        assert prompt.received is not None
        return grouped(prompt.received[layer], self.context.shape.group, self.params.group)

    def entered(self, kept: torch.Tensor, prompt: Prefilled) -> None:
        import torch

        worth = torch.stack([self.worth(prompt, layer) for layer in range(len(kept))])
        self._sums = worth.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, 0.0)

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        from kvlens.methods.families.window_attention import grouped

        received = grouped(weights.flatten(0, 1), weights.shape[1], self.params.group)[:, : self._sums.shape[-1]]
        self._sums[layer, heads.start : heads.stop, : received.shape[-1]] += received

    def priority(self) -> torch.Tensor:
        return self._sums

    def replaced(self, places: torch.Tensor) -> None:
        self._sums.scatter_(-1, places[..., None], 0.0)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return super().held() | ({"sums": (self._sums,)} if hasattr(self, "_sums") else {})
