"""Sizes of a decoder that decide what its KV cache costs."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KVShape:
    """Layers, query heads, KV heads and head size of a decoder, and the bytes of one stored number."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    """bytes of one element of K or V"""
    windows: tuple[int, ...] = ()
    """per layer: tokens of its sliding window, 0 where it has none; (): no layer has one"""

    def bound(self, tokens: int) -> KVShape:
        """Return the shape of a run of so many tokens: windows that hold all of them are left out."""
        windows = tuple(window if window < tokens else 0 for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    @property
    def global_layers(self) -> tuple[int, ...]:
        """Layers without a window."""
        return tuple(layer for layer in range(self.layers) if not self.windows or not self.windows[layer])

    def acting(self, reference: bool = False) -> KVShape:
        """Return the shape that a method's arithmetic takes: the layers on which it acts. Those are the layers without
        a window, or, where every layer has one, all layers (none for the reference, whose KV is the windows)."""
        layers = self.global_layers
        if len(layers) == self.layers or (not layers and not reference):
            return self
        return replace(self, layers=len(layers), windows=())

    def window_bytes(self, tokens: int, reference: bool = False) -> int:
        """Return the device bytes of the layers on which no method acts, in a run of so many tokens."""
        windows = self.windows if self.acting(reference).layers < self.layers else ()
        return sum(min(tokens, window) for window in windows) * self.kv_heads * self.head_token_bytes

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
        """Bytes of the full KV cache of `tokens` tokens. A layer with a window holds its newest tokens only."""
        if not self.windows:
            return tokens * self.token_bytes
        held = sum(min(tokens, window) if window else tokens for window in self.windows)
        return held * self.kv_heads * self.head_token_bytes
