"""What every store of packed keys or values does."""

from __future__ import annotations

from typing import Protocol

import torch

Heads = slice | list[int]


class Codes(Protocol):
    """What is packed of keys, or of values. Shapes: h KV heads, m tokens, D head size."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors."""

    def put(self, layer: int, heads: Heads, start: int, states: torch.Tensor) -> None:
        """Pack states [h, m, D] of the tokens from `start` on; whole groups of keys."""

    def get(self, layer: int, heads: Heads, until: int) -> torch.Tensor:
        """Return the states [h, until, D] below `until`, as far as the bits hold them."""

    def write(self, layer: int, heads: Heads, room: torch.Tensor) -> None:
        """Write the first states into room [h, m, D]."""
        room.copy_(self.get(layer, heads, room.shape[1]))


def with_newest(codes: Codes, layer: int, heads: Heads, until: int, newest: torch.Tensor) -> torch.Tensor:
    """Return the states [h, until + m, D] that are packed below `until`, and behind them newest [h, m, D]."""
    states = newest.new_empty(newest.shape[0], until + newest.shape[1], newest.shape[2])
    codes.write(layer, heads, states[:, :until])
    states[:, until:] = newest
    return states
