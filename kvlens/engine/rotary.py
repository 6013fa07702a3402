"""A model's own rotary embedding, applied to keys and taken back: for methods that want keys without their
positions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

CHANGING = ("dynamic", "longrope")
"""Kinds whose frequencies depend on how long the text was when a key was computed: such keys cannot be turned back from
their positions alone."""


class Rotary:
    """Turns keys by the model's own frequencies, scaling and layout (halves or pairs, all dimensions or the first
    ones), in float32 at least. `used`: per layer, whether it has positions at all.
    """

    def __init__(
        self, embedding: Any, apply: Callable[..., tuple[torch.Tensor, torch.Tensor]], used: tuple[bool, ...]
    ) -> None:
        self._embedding, self._apply, self.used = embedding, apply, used

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        """keys [..., m, D] at positions [m] -> the same, turned as `layer` does; with `layer` None keys [L, ..., m, D]
        of all layers.

        back: take the turn away instead, so that it and the turn are the identity up to rounding. float32, or float64
        for float64 keys.
        """
        wide = keys if keys.dtype == torch.float64 else keys.float()
        if layer is None and not all(self.used):
            return torch.stack([self(k, positions, index, back) for index, k in enumerate(wide)])
        if layer is not None and not self.used[layer]:
            return wide
        cos, sin = (part.to(wide.dtype) for part in self._embedding(wide, positions[None]))
        turned, rest = wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]
        flat = turned.reshape(1, -1, *turned.shape[-2:])
        if back:
            flat = flat / (
                cos.square() + sin.square()
            )  # 1 but for scaled embeddings (YaRN), whose scale is taken twice otherwise
            sin = -sin
        flat = self._apply(flat, flat, cos, sin)[0]
        return torch.cat((flat.view_as(turned), rest), -1)


def rotary_of(model: Any) -> Rotary | None:
    """The rotary embedding of a transformers decoder; None where it has none, or one that changes with the length of
    the text."""
    base = model.base_model
    embedding = getattr(base, "rotary_emb", None)
    apply = getattr(sys.modules[type(base).__module__], "apply_rotary_pos_emb", None)
    if embedding is None or apply is None or getattr(embedding, "rope_type", "default") in CHANGING:
        return None
    used = [True] * model.config.num_hidden_layers
    for module in base.modules():
        if hasattr(module, "use_rope") and isinstance(getattr(module, "layer_idx", None), int):
            used[module.layer_idx] = bool(module.use_rope)
    return Rotary(embedding, apply, tuple(used))
