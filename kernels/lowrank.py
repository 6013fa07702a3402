"""Spans as gated low-rank factors (eq. 6-8, 14, 18, 20: docs/kernels.md, Sources). Tensors in, tensors out.

One span of n tokens, one KV head, head size D: K ~ U diag(g) V^T with g = gate * sigma, U [n, r], V [D, r]; values
alike with their own rank. The factors of both lie in one flat buffer, which is one transfer unit:

    [U_k (n, r_k) | g_k (r_k) | V_k (r_k, D) | U_v (n, r_v) | g_v (r_v) | V_v (r_v, D)]

Keys are decomposed in the space attention uses (after RoPE), so q . K_hat needs no rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


def truncated_svd(x: Tensor, max_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., n, D] -> U [..., n, R], sigma [..., R] decreasing, V [..., R, D], R = min(n, D, max_rank) (eq. 6).

    Computed in float32 at least. Rows of zeros below x (padding of a batch) give rows of zeros in U. The sign is
    fixed (the largest entry of each right singular vector is positive), so that equal input gives equal factors.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    rank = min(x.shape[-2], x.shape[-1], max_rank)
    u, s, v = u[..., :rank], s[..., :rank], v[..., :rank, :]
    sign = torch.gather(v, -1, v.abs().argmax(-1, keepdim=True)).sign()
    sign = torch.where(sign == 0, torch.ones_like(sign), sign)
    return u * sign.transpose(-1, -2), s, v * sign


def energy_gates(sigma: Tensor, energy: Tensor, keep: float = 0.95) -> Tensor:
    """Gates 0 or 1 that need no training: the fewest components whose energy reaches `keep` of the whole, all R if
    none do.

    sigma [..., R]; energy [...]: squared Frobenius norm of the matrix; -> [..., R].
    """
    before = sigma.square().cumsum(-1) - sigma.square()
    return (before < keep * energy.unsqueeze(-1)).to(sigma.dtype)


def reconstruct(u: Tensor, g: Tensor, v: Tensor) -> Tensor:
    """U [..., n, r], g [..., r], V [..., r, D] -> [..., n, D] (eq. 8)."""
    return (u * g.unsqueeze(-2)) @ v


def gated_error(gates: Tensor, sigma: Tensor) -> Tensor:
    """sum_i (1 - m_i)^2 sigma_i^2 over the last dimension: squared error inside the R components (eq. 14)."""
    return ((1 - gates).square() * sigma.square()).sum(-1)


def relative_error(exact: Tensor, approximate: Tensor) -> Tensor:
    """Relative Frobenius error over the last two dimensions; 0 where the exact matrix is zero."""
    norm = torch.linalg.matrix_norm(exact)
    return torch.where(norm > 0, torch.linalg.matrix_norm(exact - approximate) / norm.clamp_min(1e-30), 0.0)


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
