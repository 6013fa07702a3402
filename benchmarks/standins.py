"""What stands in for a tokenizer, for trained filters and for kept tokens in `make oracle` (benchmarks/oracle.py)."""

from __future__ import annotations

import numpy as np
import torch

from kvlens.shape import KVShape


class NoTokenizer:
    """Stands where a press asks for a tokenizer. Text is one token a byte, as in oracle_presses.py."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return ""


def kept_channels(channels: tuple[tuple[tuple[int, ...], ...], ...], head_dim: int) -> np.ndarray:
    """Return the channels of keys that stay: bool [L, H_kv, D]."""
    mask = np.zeros((len(channels), len(channels[0]), head_dim), bool)
    for layer, head in np.ndindex(*mask.shape[:2]):
        mask[layer, head, list(channels[layer][head])] = True
    return mask


def drawn_filters(shape: KVShape) -> np.ndarray:
    """Return the filters that Q-Filters draws with filters=drawn and the seed 0: float32 [L, H_kv, D]."""
    rows = []
    for layer in range(shape.layers):
        generator = torch.Generator().manual_seed(layer)
        rows.append(torch.randn(shape.kv_heads, shape.head_dim, generator=generator))
    return torch.stack(rows).numpy()
