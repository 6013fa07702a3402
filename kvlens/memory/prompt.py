"""The prompt's KV while it is being prefilled: whole, exact, on the device. Prefill attention is full for every
method."""

from __future__ import annotations

import torch

from kvlens.shape import KVShape


class PromptStore:
    """Owns keys, values [L, H_kv, n, D] of the n prompt tokens that prefill covers, and how many of them each layer has
    seen."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        self.tokens = tokens
        self.keys = torch.zeros(shape.layers, shape.kv_heads, tokens, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._seen = [0] * shape.layers

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A chunk of one layer: keys, values [H_kv, m, D]. Raises AssertionError past the announced number of
        tokens."""
        first, m = self._seen[layer], keys.shape[1]
        assert first + m <= self.tokens, f"layer {layer}: {first + m} prompt tokens, {self.tokens} announced"
        self.keys[layer, :, first : first + m], self.values[layer, :, first : first + m] = keys, values
        self._seen[layer] = first + m

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values [1, H_kv, seen, D] of what one layer has seen."""
        seen = self._seen[layer]
        return self.keys[layer, None, :, :seen], self.values[layer, None, :, :seen]

    def seen(self, layer: int) -> int:
        return self._seen[layer]
