"""The seam with transformers: one attention function, by which the teacher is read and the student attends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from kvlens.engine.hf_attention import refuse_unsupported

ATTENTION = "kvlens_sekv_training"


class Trip(Protocol):
    """One way through the model."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [B, H, T, D], key and value [B, H_kv, T, D] of a layer, scale of its logits -> [B, H, T, D]."""
        ...


@dataclass
class Reading:
    """The teacher's way: full attention. It collects the queries of the last `suffix` positions, keys and values."""

    suffix: int
    scaling: float = 0.0
    """of the model's attention logits, set by the first layer"""
    captured: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """layer -> queries of the suffix [B, H, T, D], keys and values [B, H_kv, n, D]"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.scaling = scale
        self.captured[layer] = (query[:, :, -self.suffix :], key, value)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sekv: Trip | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: query [B, H, T, D], key and value [B, H_kv, T, D] -> [B, T, H, D]."""
    refuse_unsupported(module, kwargs)
    assert sekv is not None, "the model attends by this function inside a trip alone"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = sekv.attend(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)
