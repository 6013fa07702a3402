"""A model whose KV heads attend to everything or to first and newest tokens, mixed by a gate each: the pass with
gradients in which the gates learn.

Shapes: L layers, Hq query heads, H_kv KV heads, n tokens, D head size. Batch is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvlens.engine.hf_attention import attending, refuse_unsupported

ATTENTION = "kvlens_duoattention_training"


@dataclass(frozen=True)
class Gates:
    """One trip through the model. alpha None: every head attends to everything."""

    sinks: int
    recent: int
    alpha: Tensor | None = None
    """[L, H_kv], 1: everything"""


def streaming_mask(n: int, sinks: int, recent: int) -> Tensor:
    """bool [n, n]: the first `sinks` and the newest `recent` tokens of what each token may see, itself included."""
    row, column = torch.arange(n)[:, None], torch.arange(n)
    return (column <= row) & ((column < sinks) | (column > row - recent))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    duo: Gates | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: query [1, Hq, n, D], key and value [1, H_kv, n, D] -> [1, n, Hq, D]:
    alpha * full + (1 - alpha) * streaming (paper eq. 1)."""
    refuse_unsupported(module, kwargs)
    assert duo is not None, "the model attends by this function inside a pass alone"
    attend = partial(F.scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    out = attend(query, key, value, is_causal=True)
    if duo.alpha is not None:
        mask = streaming_mask(query.shape[2], duo.sinks, duo.recent).to(query.device)
        near = attend(query, key, value, attn_mask=mask)
        alpha = duo.alpha[int(module.layer_idx)].repeat_interleave(query.shape[1] // key.shape[1])  # type: ignore[arg-type]
        out = near + alpha[:, None, None] * (out - near)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)


class Trainer:
    """Owns the gates [L, H_kv], which begin at 1, and their optimizer. The model stays as it is."""

    def __init__(
        self, model: PreTrainedModel, shape: tuple[int, int], sinks: int, recent: int, rate: float, weight: float
    ) -> None:
        """weight: of the sum of the gates, beside the distance of hidden states."""
        self.model, self.sinks, self.recent, self.weight = model, sinks, recent, weight
        self.alpha = nn.Parameter(torch.ones(shape, device=model.device))
        self._optimizer = torch.optim.Adam([self.alpha], lr=rate)

    def loss(self, ids: Tensor, counted: Tensor) -> Tensor:
        """Squared distance between the last hidden states with and without gates, mean over the tokens bool [n] that
        count (paper eq. 2): ids [1, n]."""
        base = self.model.base_model
        with attending(self.model, ATTENTION):
            with torch.no_grad():
                full = base(input_ids=ids, use_cache=False, duo=Gates(self.sinks, self.recent)).last_hidden_state
            gates = Gates(self.sinks, self.recent, self.alpha)
            own_rows = base(input_ids=ids, use_cache=False, duo=gates).last_hidden_state
        return (own_rows - full)[0, counted].float().square().sum(-1).mean()

    def advance(self, ids: Tensor, counted: Tensor) -> dict[str, float]:
        """One step of the optimizer (paper eq. 3); gates stay within 0 and 1."""
        self._optimizer.zero_grad(set_to_none=True)
        distance = self.loss(ids, counted)
        (distance + self.weight * self.alpha.abs().sum()).backward()
        self._optimizer.step()
        with torch.no_grad():
            self.alpha.clamp_(0, 1)
        return {"distance": float(distance.detach()), "gates": float(self.alpha.detach().mean())}
