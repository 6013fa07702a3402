"""TOVA: what the newest query attends to least goes, one set of tokens per layer."""

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
class TovaParameters(DecodeEvictionParameters):
    """Lengths are in tokens."""

    recent: int = param(1, "newest tokens, not evicted", ours=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 1:
            raise ValueError("recent must be at least 1: the newest token has just come.")


class Tova(DecodeEviction):
    """Token omission via attention: at every step the token that this step's query attends to least, by the mean over
    all heads of the layer, goes for good; all heads of a layer keep the same tokens (paper sec. 3.2). The prompt is cut
    by its last query.

    Departures: the prompt is cut when prefill has ended, by the last query that prefill covered, where the paper cuts
    while it reads. The newest token is not evicted at once (`recent`).
    """

    name = "tova"
    title = "TOVA"
    paper = "Oren et al., Transformers are Multi-State RNNs, EMNLP 2024"
    summary = "drops, for every token that comes, the one that the newest query attends to least, for a whole layer"
    Parameters = TovaParameters
    presets = {"paper": {}, "demo": {"recent": 4}}  # noqa: RUF012
    needs = Needs(queries=1, weights=True)
    params: TovaParameters

    @classmethod
    def own_bytes(cls, params: TovaParameters, shape: KVShape, places: int) -> int:
        return shape.layers * shape.kv_heads * places * 4

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        from kvlens.methods.families import window_attention as window

        shape = self.context.shape
        queries, keys = window.observed(prompt, layer, range(shape.q_heads), shape.group, 1, None)
        return window.paid(queries, keys)[:, 0].mean(0).expand(shape.kv_heads, -1)

    def entered(self, kept: torch.Tensor, prompt: Prefilled) -> None:
        import torch

        self._paid = torch.zeros(kept.shape, device=kept.device)

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        wide = min(weights.shape[-1], self._paid.shape[-1])
        self._paid[layer, heads.start : heads.stop, :wide] = weights[..., :wide].mean(1)

    def priority(self) -> torch.Tensor:
        return self._paid.mean(1, keepdim=True).expand(self._paid.shape)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return super().held() | ({"paid": (self._paid,)} if hasattr(self, "_paid") else {})
