"""Full KV's passes beside the lanes of a race, computed once for lanes that have decoded the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_SHARED_BYTES = 256 << 20
"""that the lanes of a race keep of full KV's passes"""
Layers = tuple[tuple[int, ...], ...]
"""layers whose attention is kept, by step of a pass"""

Passes = tuple[tuple[int, ...], ...]
"""tokens that were fed after the prompt, by pass"""


@dataclass(frozen=True)
class FullKVPass:
    """What a pass of full KV left: attention rows, and the keys and values of its tokens [2, L, H_kv, m, D]."""

    rows: list[torch.Tensor | None]
    new: torch.Tensor


class SharedPasses:
    """Full KV's passes beside the lanes of a race. A lane that has fed the same tokens in the same passes takes what
    another lane computed: the same numbers, bit for bit. One lane at a time uses it."""

    def __init__(self, most_bytes: int = MOST_SHARED_BYTES) -> None:
        """most_bytes: of all passes; later passes are not kept."""
        self._passes: dict[tuple[Passes, Layers], FullKVPass] = {}
        self._free = most_bytes
        self.reuses = 0
        """passes that a lane took from another lane"""

    def find(self, path: Passes, layers: Layers) -> FullKVPass | None:
        """Return the last pass of a path in which these layers were sampled; None: no lane has made it."""
        entry = self._passes.get((path, layers))
        self.reuses += entry is not None
        return entry

    def keep(self, path: Passes, layers: Layers, rows: list[torch.Tensor | None], new: torch.Tensor) -> None:
        """Keep a pass, if there is room."""
        size = sum(part.nbytes for part in (new, *rows) if part is not None)
        if size <= self._free:
            self._free -= size
            self._passes[path, layers] = FullKVPass(rows, new.clone())
