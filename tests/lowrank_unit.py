"""One unit of SeKV's factors at a time, as its format is written down in kernels/lowrank.py: the plain way that batches
are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlens.kernels.lowrank import reconstruct


@dataclass(frozen=True)
class Factors:
    """One matrix [n, D] as U [n, r], g [r] = gate * sigma, V [r, D] (rows are right singular vectors)."""

    u: Tensor
    g: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        return self.g.shape[-1]

    def dense(self) -> Tensor:
        """The matrix the factors stand for, [n, D] (eq. 8)."""
        return reconstruct(self.u, self.g, self.v)


def pack(key: Factors, value: Factors) -> Tensor:
    """Factors of keys and values -> the flat unit."""
    return torch.cat([part.reshape(-1) for f in (key, value) for part in (f.u, f.g, f.v)])


def unpack(flat: Tensor, n: int, rank_k: int, rank_v: int, dim: int) -> tuple[Factors, Factors]:
    """The flat unit -> views of its factors. Raises ValueError when the size does not fit the shape."""
    sizes = [size for r in (rank_k, rank_v) for size in (n * r, r, r * dim)]
    if flat.numel() != sum(sizes):
        raise ValueError(
            f"a unit of {n} tokens, ranks {rank_k} and {rank_v}, has {sum(sizes)} numbers, not {flat.numel()}"
        )
    u_k, g_k, v_k, u_v, g_v, v_v = flat.split(sizes)
    return (
        Factors(u_k.view(n, rank_k), g_k, v_k.view(rank_k, dim)),
        Factors(u_v.view(n, rank_v), g_v, v_v.view(rank_v, dim)),
    )


def compress(sigma: Tensor, gates: Tensor, u: Tensor, v: Tensor, drop: float) -> Factors:
    """Factors without the components whose gate is at most `drop`; the others keep their soft gate (sec. 3.2).

    u [n, R], sigma, gates [R], v [R, D]. The strongest component always stays.
    """
    kept = gates > drop
    kept[0] = True
    return Factors(u[:, kept], (gates * sigma)[kept], v[kept])
