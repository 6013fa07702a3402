"""Keys or values of groups of neighbouring layers as products: a basis that all layers of a group share, with a row for
each token, and a matrix of each layer. Tokens of the prompt alone.

The keys, or values, of a group's layers side by side are a matrix with a row for each token. Its first left singular
vectors, times their singular values, are the basis; the right singular vectors are the layers' matrices. Source: Chang
et al., arXiv 2503.18893, and code. Shapes: h KV heads, n tokens, D head size, r rank, C = layers of a group * h * D.
"""

from __future__ import annotations

import torch

from kvlens.quantised.form import Quantised, Turn
from kvlens.quantised.stored import Codes
from kvlens.shape import KVShape


class SharedLayers(Codes):
    """Owns the bases and matrices of all layers, of keys or of values."""

    def __init__(
        self, shape: KVShape, form: Quantised, rank: int, turn: Turn | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """turn: the model's rotary embedding, for keys that are decomposed without it; None: as they are."""
        self._groups, self._shape, self._turn, self._dtype = form.layer_groups(shape.layers), shape, turn, dtype
        self._bases, self._matrices = [], []
        for group in self._groups:
            columns = len(group) * shape.kv_heads * shape.head_dim
            width = form.rank_of(rank, shape, len(group))
            self._bases.append(torch.zeros(form.positions, width, dtype=dtype, device=device))
            self._matrices.append(torch.zeros(width, columns, dtype=dtype, device=device))
        self._waiting: dict[int, torch.Tensor] = {}
        """states of layers, until those of all layers of their group come"""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._bases, *self._matrices)

    def put(self, layer: int, heads: slice | list[int], start: int, states: torch.Tensor) -> None:
        assert start == 0, "the prompt is decomposed at once"
        assert len(states) == self._shape.kv_heads, "all KV heads of a layer share a basis"
        number = next(number for number, group in enumerate(self._groups) if layer in group)
        group, wide = self._groups[number], states.float()
        if self._turn is not None:
            wide = self._turn(wide, torch.arange(states.shape[1], device=states.device), layer, back=True)
        self._waiting[layer] = wide
        if layer == group[-1]:
            whole = torch.cat([self._waiting.pop(member).transpose(0, 1).flatten(1) for member in group], 1)
            basis, matrix = decompose(whole, self._bases[number].shape[1])
            self._bases[number].copy_(basis)
            self._matrices[number].copy_(matrix)

    def get(self, layer: int, heads: slice | list[int], until: int) -> torch.Tensor:
        number = next(number for number, group in enumerate(self._groups) if layer in group)
        place, size = self._groups[number].index(layer), self._shape.kv_heads * self._shape.head_dim
        matrix = self._matrices[number][:, place * size : (place + 1) * size]
        rows = self._bases[number][:until].float() @ matrix.float()
        states = rows.unflatten(1, (self._shape.kv_heads, -1)).transpose(0, 1)[heads]
        if self._turn is not None:
            states = self._turn(states, torch.arange(until, device=states.device), layer)
        return states.to(self._dtype)


def decompose(rows: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product of rank `rank` that is nearest to rows [n, C], float64: left singular vectors times singular
    values [n, r], and right singular vectors [r, C]."""
    wide = rows.double()
    if wide.shape[0] < wide.shape[1]:
        left_vectors = torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(-1)[:, :rank]
        return left_vectors, left_vectors.T @ wide
    right_vectors = torch.linalg.eigh(wide.T @ wide).eigenvectors.flip(-1)[:, :rank]
    return wide @ right_vectors, right_vectors.T
