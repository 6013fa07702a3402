"""TidalDecode: few layers read everything and choose; the layers behind them read the same positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.read_on_device import ReadOnDevice
from kvlens.methods.fitting import clamp
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Selection


@dataclass(frozen=True)
class TidalDecodeParameters:
    """Lengths are in tokens. Defaults are those of the authors' code."""

    tokens: int = param(512, "tokens that a query head reads in layers that do not choose, the step's own included")
    select_layer: int = param(2, "layer that chooses first; those before it read everything too")
    reselect_layer: int = param(9, "layer that chooses anew; 0, or a layer that the model does not have: none")
    page: int = param(16, "tokens per page: pages are the spans that masses and rankings are logged for", ours=True)

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.page < 1:
            raise ValueError("tokens and page must be at least 1.")
        if self.select_layer < 0 or self.reselect_layer < 0:
            raise ValueError("select_layer and reselect_layer must be at least 0.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """An eighth of the prompt is read, 16 tokens at least and 512 at most (ours). The layers that choose are as far
        into the model as 2 and 9 of 32, at least the first and the second."""
        layer = clamp(shape.layers * 2 / 32, 0, 2)
        return {
            "tokens": clamp((prompt_tokens + 1) / 8, 16, 512),
            "select_layer": layer,
            "reselect_layer": clamp(shape.layers * 9 / 32, layer + 1, 9),
        }

    def misfit(self, prompt_tokens: int) -> str | None:
        """Nothing would be left out."""
        if self.tokens <= prompt_tokens:
            return None
        return f"it has {prompt_tokens + 1:,} tokens, all read, since up to {self.tokens:,} are"


class TidalDecode(ReadOnDevice):
    """At every step two layers attend everything and choose: each query head the tokens of its largest attention
    weights, `tokens` with the step's own. The layers behind them attend those positions alone, each query head those of
    its namesake, until the second choosing layer chooses anew (position persistent sparse attention). The
    layers before the first choosing one attend everything. Reads shrink; every token stays on the device.

    Departures: the paper chooses the second layer for each model by a test, and there is none here. Its cache
    correction, a prefill of decoded tokens from time to time, is left out.
    """

    name = "tidaldecode"
    title = "TidalDecode"
    paper = (
        "Yang et al., TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention, ICLR 2025"
    )
    summary = (
        "keeps every token on the device; two layers, and those before the first of them, read all; the two choose "
        "what later layers read"
    )
    Parameters = TidalDecodeParameters
    presets = {"paper": {}, "demo": {"tokens": 64, "select_layer": 1, "reselect_layer": 2}}  # noqa: RUF012
    needs = Needs(weights=True)
    params: TidalDecodeParameters

    @classmethod
    def own_bytes(cls, params: TidalDecodeParameters, shape: KVShape, tokens: int) -> int:
        return shape.q_heads * tokens

    def begin(self, prompt: Prefilled) -> None:
        import torch

        shape = self.context.shape
        size = shape.kv_heads, shape.group, self._places
        self._chosen = torch.zeros(*size, dtype=torch.bool, device=self.context.device)
        self._tokens = [self.context.prompt_tokens] * shape.layers

    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._tokens[layer] += 1

    def _chooses(self, layer: int) -> bool:
        return layer == self.params.select_layer or layer == self.params.reselect_layer > self.params.select_layer

    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        from kvlens.memory.placement import Selection

        n = self._tokens[layer]
        if layer < self.params.select_layer or self._chooses(layer) or n <= self.params.tokens:
            return None
        return Selection(
            self.by_span(self._chosen[..., :n], False).any(-1),
            self._none,
            positions=self._chosen,
            index_bytes=self._chosen.shape[1] * n,
        )

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        import torch

        n = self._tokens[layer]
        if not self._chooses(layer) or n <= self.params.tokens:
            return
        places = position.long()[:, None].expand(weights.shape)
        by_token = torch.full((*weights.shape[:2], self._places + 1), -1.0, device=weights.device)
        by_token.scatter_(2, places.masked_fill(places < 0, self._places), weights)
        by_token[..., n - 1] = torch.inf  # the step's own token
        order = by_token[..., :n].argsort(dim=-1, descending=True, stable=True)[..., : self.params.tokens]
        positions = self._chosen.clone()
        positions[heads.start : heads.stop] = False
        positions[heads.start : heads.stop].scatter_(2, order, True)
        self._chosen = positions

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"chosen positions": (self._chosen,)} if hasattr(self, "_chosen") else {}
