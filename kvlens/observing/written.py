"""The shadow copy: keys and values as the model wrote them, by position."""

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


ROOM = 256
"""positions by which the shadow copy grows, at least"""


class Shadow:
    """Owns the copies of all layers in one tensor [2, L, H_kv, room, D], which grows by a quarter."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._pairs: torch.Tensor | None = None

    def put(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy keys, values [H_kv, m, D] of one layer to the positions from `start` on."""
        end = start + keys.shape[1]
        if self._pairs is None or end > self._pairs.shape[3]:
            self._grow(end, keys)
        assert self._pairs is not None
        self._pairs[0, layer, :, start:end] = keys.detach()
        self._pairs[1, layer, :, start:end] = values.detach()

    def _grow(self, end: int, keys: torch.Tensor) -> None:
        room = end + max(ROOM, end // 4)
        whole = keys.new_zeros(2, self._layers, keys.shape[0], room, keys.shape[2], requires_grad=False)
        if self._pairs is not None:
            whole[:, :, :, : self._pairs.shape[3]] = self._pairs
        self._pairs = whole

    def keys(self, count: int) -> torch.Tensor | None:
        """Return the keys of all layers up to `count`, [L, H_kv, n, D], a view; None: nothing was copied."""
        return None if self._pairs is None else self._pairs[0, :, :, :count]

    def pair(self, layer: int, count: int) -> torch.Tensor | None:
        """Return keys and values of one layer up to `count`, [2, H_kv, n, D], a view; None: nothing was copied."""
        return None if self._pairs is None else self._pairs[:, layer, :, :count]

    def prompt(self, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return keys and values of all layers up to `count`, [L, H_kv, n, D] each, views; None: nothing was copied."""
        return None if self._pairs is None else (self._pairs[0, :, :, :count], self._pairs[1, :, :, :count])

    @property
    def bytes(self) -> int:
        """Bytes of the tensor, its room included."""
        return 0 if self._pairs is None else self._pairs.nbytes


class Written:
    """Owns what one layer wrote of one sequence: digests of keys and values, int64 [2, H_kv, n], and its part of the
    shadow copy, where there is one."""

    def __init__(self, shadow: Shadow | None, layer: int, kv_heads: int) -> None:
        """shadow: None: only digests are kept, 16 bytes for each position and KV head."""
        self._shadow, self._layer, self._kv_heads = shadow, layer, kv_heads
        self._digests: list[torch.Tensor] = []
        self.count = 0
        """positions written"""
        self.latent = False
        """the cache holds one vector per token in place of each KV head's keys and values"""
        self.unsized = False
        """an entry has another size than the keys and values of one KV head, so that bytes read are not known"""
        self.version = 0
        """changes with every change of what is held"""

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take keys, values [H_kv, m, D] of the next positions. They are copied if both have one size and a vector
        for each KV head. Of another number of heads (MLA: 1) key and value together tell a token."""
        self.latent = len(keys) != self._kv_heads
        self.unsized = self.latent or keys.shape != values.shape
        if self.latent:
            keys = values = torch.cat([keys, values], -1)
        self._digests.append(torch.stack([digests(keys), digests(values)]))
        if self._shadow is not None and not self.unsized:
            self._shadow.put(self._layer, self.count, keys, values)
        self.count += keys.shape[1]
        self.version += 1

    def cut(self, count: int) -> None:
        """Forget the positions from `count` on."""
        if count < self.count:
            self._digests = [self.digests[:, :, :count].clone()]
            self.count, self.version = count, self.version + 1

    @property
    def digests(self) -> torch.Tensor:
        """Return the digests, int64 [2, H_kv, n], of keys and of values."""
        if len(self._digests) > 1:
            self._digests = [torch.cat(self._digests, 2)]
        return self._digests[0]

    @property
    def keys(self) -> torch.Tensor | None:
        """Return [H_kv, n, D]; None: only digests are kept."""
        return None if (pair := self._pair()) is None else pair[0]

    @property
    def values(self) -> torch.Tensor | None:
        """Return [H_kv, n, D]; None: only digests are kept."""
        return None if (pair := self._pair()) is None else pair[1]

    def _pair(self) -> torch.Tensor | None:
        return None if self._shadow is None else self._shadow.pair(self._layer, self.count)
