"""One unit of SeKV's factors at a time, as kernels/lowrank.py writes its format down: the plain way that batches are
held against."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlens.kernels.lowrank import Factors


def pack(key: Factors, value: Factors) -> Tensor:
    """Factors of keys and values -> the flat unit."""
    return torch.cat([part.reshape(-1) for f in (key, value) for part in (f.u, f.g, f.v)])


def compress(sigma: Tensor, gates: Tensor, u: Tensor, v: Tensor, drop: float) -> Factors:
    """Factors without the components whose gate is at most `drop`; the others keep their soft gate (sec. 3.2).

    u [n, R], sigma, gates [R], v [R, D]. The strongest component always stays.
    """
    kept = gates > drop
    kept[0] = True
    return Factors(u[:, kept], (gates * sigma)[kept], v[kept])
