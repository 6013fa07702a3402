"""Sizes of a decoder that decide what its KV cache costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVShape:
    """Layers, query heads, KV heads and head size of a decoder, and the bytes of one stored number."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    """bytes of one element of K or V"""

    @property
    def group(self) -> int:
        """Query heads that share one KV head (the GQA group)."""
        return self.q_heads // self.kv_heads

    @property
    def head_token_bytes(self) -> int:
        """Bytes of one token's K and V for one (layer, KV head)."""
        return 2 * self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers and KV heads."""
        return self.layers * self.kv_heads * self.head_token_bytes

    def full_kv_bytes(self, tokens: int) -> int:
        """Bytes of the full KV cache of `tokens` tokens."""
        return tokens * self.token_bytes
