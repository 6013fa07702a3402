"""Stands where an installed kvpress does: its two base classes by their interface, and presses of every kind that the
adapter has to tell apart. Tests put its folder on the path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__version__ = "0.0.test"


@dataclass
class BasePress:
    def post_init_from_model(self, model: Any) -> None:
        """For presses that prepare themselves."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass
class ScorerPress(BasePress):
    compression_ratio: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.compression_ratio < 1, "the ratio must lie between 0 and 1"

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        score = self.score(module, hidden_states, keys, values, attentions, kwargs)
        return score.topk(int(keys.shape[2] * (1 - self.compression_ratio)), -1).indices


@dataclass
class NormPress(ScorerPress):
    """Short keys stay.

    And more.
    """

    power: float = 2.0
    flipped: bool = False
    weights: list[int] = field(default_factory=list)
    page: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.power > 0, "power must be above 0"

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        length = keys.abs().pow(self.power).sum(-1)
        return length if self.flipped else -length


@dataclass
class QueryPress(ScorerPress):
    """What the last queries attend to, which the layer's own projection makes of what it was given."""

    window_size: int = 8

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        assert attentions is None
        heads, d = module.config.num_attention_heads, module.head_dim
        q = module.q_proj(hidden_states[:, -self.window_size :]).unflatten(-1, (heads, d)).transpose(1, 2)
        cos, sin = (part[:, None, -self.window_size :] for part in kwargs["position_embeddings"])
        own = module.rotary_emb(hidden_states, torch.arange(keys.shape[2])[None])
        assert torch.equal(own[0][:, None, -self.window_size :], cos)
        half = d // 2
        q = q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin
        weights = (q.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].transpose(-1, -2) / d**0.5).softmax(-1)
        return weights.mean((2, 3))


@dataclass
class SharePress(ScorerPress):
    """The middle goes, as much of it as the share that is to be removed."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        score, n = torch.ones_like(keys[..., 0]), keys.shape[2]
        score[..., 5 : 5 + n - int(n * (1 - self.compression_ratio))] = 0
        return score


@dataclass
class DrawnPress(ScorerPress):
    """By chance."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return torch.rand(keys.shape[:3])


@dataclass
class WeightsPress(ScorerPress):
    """Wants attention weights."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        assert attentions is not None, "set attn_implementation to eager\nand run again"


@dataclass
class WholePress(ScorerPress):
    """One number per token, none per KV head."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return torch.ones(1, keys.shape[2])


@dataclass
class OwnCutPress(NormPress):
    """Scores, and cuts otherwise."""

    def compress(self, *given: Any) -> Any:
        return None


@dataclass
class PreparedPress(NormPress):
    """Looks at the model first."""

    def post_init_from_model(self, model: Any) -> None:
        raise AssertionError("never called")


@dataclass
class AroundPress(ScorerPress):
    """Around another press."""

    press: Any = field(kw_only=True)

    def score(self, *given: Any) -> Any:
        return None


@dataclass
class MaskPress(BasePress):
    """No scorer."""


def wrapped(function: Any) -> Any:
    def call(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float, **kwargs: Any) -> Any:
        raise AssertionError("attention goes through what kvpress has put there")

    return call


for name, function in ALL_ATTENTION_FUNCTIONS.items():
    ALL_ATTENTION_FUNCTIONS[name] = wrapped(function)
