"""The keys of all positions of a run: the prompt's and the decoded tokens', side by side and never joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.memory.memory import Memory
from kvlens.memory.windowed import WindowedLayers


@dataclass(frozen=True)
class KeyParts:
    """Stands for keys [L, H_kv, n, D] without a copy of the prompt's."""

    prompt: torch.Tensor
    """[L, H_kv, N, D]"""
    decoded: torch.Tensor
    """[L, H_kv, n - N, D], of the tokens after the prompt"""

    @property
    def shape(self) -> torch.Size:
        """Return [L, H_kv, n, D]."""
        layers, kv_heads, tokens, head_dim = self.prompt.shape
        return torch.Size((layers, kv_heads, tokens + self.decoded.shape[2], head_dim))


def layer_keys(keys: torch.Tensor | KeyParts, layer: int) -> tuple[torch.Tensor, ...]:
    """Return the keys [H_kv, ., D] of a layer, in parts by position, without a copy."""
    return (keys.prompt[layer], keys.decoded[layer]) if isinstance(keys, KeyParts) else (keys[layer],)


class WatchedKeys:
    """The keys of a run, which grow by a token a step. It owns the decoded tokens' keys and copies no other."""

    def __init__(self, memory: Memory, windowed: WindowedLayers, prompt: torch.Tensor | None, max_new: int) -> None:
        """prompt: its keys [L, H_kv, N, D], which must not change; None: the slots keep all keys by position."""
        self._memory, self._windowed = memory, windowed
        self._keys: KeyParts | None = None
        if prompt is not None:
            self._keys = KeyParts(prompt, prompt.new_zeros(*prompt.shape[:2], max_new, prompt.shape[3]))

    def until(self, position: int) -> torch.Tensor | KeyParts:
        """Return the keys of all positions up to `position`, which is the newest and is read from the memory."""
        hot = self._memory.hot
        if self._keys is None:
            return hot.pools[0].keys[:, :, : position + 1]
        prompt, decoded = self._keys.prompt, self._keys.decoded
        step = position - prompt.shape[2]
        decoded[list(self._windowed.numbers), :, step] = hot.read_window(position, position + 1)[0][:, :, 0]
        for layer, ring in self._windowed.rings.items():
            decoded[layer, :, step] = ring[0, :, position % ring.shape[2]]
        return KeyParts(prompt, decoded[:, :, : step + 1])
