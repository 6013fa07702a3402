"""The shadow copy of one layer: keys and values as the model wrote them, by position."""

from __future__ import annotations

import torch


def digests(vectors: torch.Tensor) -> torch.Tensor:
    """Return a number for the bits of each vector: int64 [H, n] of [H, n, D]. Equal vectors have equal numbers."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[vectors.element_size()]
    bits = vectors.detach().contiguous().view(whole).long()
    generator = torch.Generator().manual_seed(0x5EED)
    odd = torch.randint(-(2**61), 2**61, (vectors.shape[-1],), generator=generator, dtype=torch.int64) * 2 + 1
    mixed = (bits + 1) * odd.to(bits.device)
    return (mixed ^ (mixed >> 31)).sum(-1)


class Written:
    """Owns what one layer wrote of one sequence: digests of keys and values, int64 [2, H_kv, n], and, where they are
    copied, keys and values [2, H_kv, n, D]."""

    def __init__(self, copied: bool) -> None:
        """copied: keep keys and values; else only their digests, 16 bytes for each position and KV head."""
        self._copied = copied
        self._pairs: list[torch.Tensor] = []
        self._digests: list[torch.Tensor] = []
        self.count = 0
        """positions written"""
        self.version = 0
        """changes with every change of what is held"""

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take keys, values [H_kv, m, D] of the next positions."""
        self._digests.append(torch.stack([digests(keys), digests(values)]))
        if self._copied and keys.shape == values.shape:
            self._pairs.append(torch.stack([keys.detach(), values.detach()]))
        self.count += keys.shape[1]
        self.version += 1

    def cut(self, count: int) -> None:
        """Forget the positions from `count` on."""
        if count < self.count:
            self._digests = [self.digests[:, :, :count].clone()]
            self._pairs = [self._whole()[:, :, :count].clone()] if self._pairs else []
            self.count, self.version = count, self.version + 1

    @property
    def digests(self) -> torch.Tensor:
        """int64 [2, H_kv, n], of keys and of values"""
        if len(self._digests) > 1:
            self._digests = [torch.cat(self._digests, 2)]
        return self._digests[0]

    @property
    def keys(self) -> torch.Tensor | None:
        """[H_kv, n, D]; None: only digests are kept"""
        return self._whole()[0] if self._pairs else None

    @property
    def values(self) -> torch.Tensor | None:
        """[H_kv, n, D]; None: only digests are kept"""
        return self._whole()[1] if self._pairs else None

    def _whole(self) -> torch.Tensor:
        if len(self._pairs) > 1:
            self._pairs = [torch.cat(self._pairs, 2)]
        return self._pairs[0]

    @property
    def bytes(self) -> int:
        """Bytes of the copied keys and values."""
        return sum(pair.nbytes for pair in self._pairs)
