"""Spans as gated low-rank factors (eq. 6-8, 14, 18, 20: docs/evidence/kernels.md, Sources). Tensors in, tensors out.

One span of n tokens, one KV head, head size D: K ~ U diag(g) V^T with g = gate * sigma, U [n, r], V [D, r]; values
alike with their own rank. The factors of both lie in one flat buffer, which is one transfer unit:

    [U_k (n, r_k) | g_k (r_k) | V_k (r_k, D) | U_v (n, r_v) | g_v (r_v) | V_v (r_v, D)]

Keys are decomposed in the space attention uses (after RoPE), so q . K_hat needs no rotation.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-7
"""singular values below this share of the largest are 0: what float32 holds of them is its own rounding"""
LARGEST_BATCHED = 32
"""rows up to which torch decomposes a batch on a CUDA device at once; larger matrices go through it one by one"""


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

    Computed in float32 at least; of anything but float64 by the eigenvectors of x x^T or x^T x in float64, which for
    many small matrices takes a half to a quarter of an SVD's time and is as exact as float32 can say. Rows of zeros
    below x (padding of a batch) give rows of zeros in U, and singular values of 0 zeros in U and V. The sign is fixed
    (the largest entry of each right singular vector is positive), so that equal input gives equal factors.
    """
    rank = min(x.shape[-2], x.shape[-1], max_rank)
    if x.dtype == torch.float64:
        u, s, v = torch.linalg.svd(x, full_matrices=False)
    else:
        u, s, v = (part.float() for part in _by_squares(x.double()))
    u, s, v = u[..., :rank], s[..., :rank], v[..., :rank, :]
    sign = torch.gather(v, -1, v.abs().argmax(-1, keepdim=True)).sign()
    sign = torch.where(sign == 0, torch.ones_like(sign), sign)
    return u * sign.transpose(-1, -2), s, v * sign


def _by_squares(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As torch.linalg.svd without full matrices, x [..., n, D] float64."""
    tall = x.shape[-2] > x.shape[-1]
    rows = x.mT if tall else x
    squares, u = symmetric_eigen(rows @ rows.mT)
    s, u = squares.clamp_min(0).sqrt().flip(-1), u.flip(-1)
    nonzero = s > SMALLEST * s[..., :1]
    s, u = torch.where(nonzero, s, 0), torch.where(nonzero[..., None, :], u, 0)
    right = (u.mT @ rows) / torch.where(nonzero, s, 1)[..., None]
    return (right.mT, s, u.mT) if tall else (u, s, right)


def energy_gates(sigma: Tensor, energy: Tensor, keep: float = 0.95) -> Tensor:
    """Gates 0 or 1 that need no training: the fewest components whose energy reaches `keep` of the whole, all R if
    none do.

    sigma [..., R]; energy [...]: squared Frobenius norm of the matrix; -> [..., R].
    """
    energy_before = sigma.square().cumsum(-1) - sigma.square()
    return (energy_before < keep * energy.unsqueeze(-1)).to(sigma.dtype)


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


def dense_units(
    flat: Tensor, start: Tensor, n: Tensor, rank: Tensor, sizes: tuple[int, int, int], wide: bool = False
) -> Tensor:
    """Matrices out of packed units, many at once: [U (n, r) | g (r) | V (r, D)] begins at `start` [...] of `flat` [N].

    n, rank [...]: of each; sizes: T tokens and R components that hold any of them, and D -> [..., T, D], what is behind
    n of a matrix is 0. Ranks are padded with zeros to the largest. wide: in float32.
    """
    start, n, rank = (x[..., None, None] for x in (start, n, rank))
    t, r, d = (torch.arange(size, device=flat.device) for size in sizes)
    in_rank = r < rank

    def read(address: Tensor, mask: Tensor) -> Tensor:
        values = torch.where(mask, flat[torch.where(mask, address, 0)], 0)
        return values.float() if wide else values

    u = read(start + t[:, None] * rank + r, in_rank & (t[:, None] < n))
    g = read(start + n * rank + r, in_rank)[..., 0, :]
    v = read(start + (n + 1) * rank + r[:, None] * sizes[2] + d, in_rank.transpose(-1, -2))
    return reconstruct(u, g, v)


def symmetric_eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues [..., n], increasing, and eigenvectors [..., n, n] of symmetric matrices [..., n, n], as
    torch.linalg.eigh does. Where a CUDA device would take the matrices one by one, the processor's threads take them.
    """
    if not matrices.is_cuda or matrices.shape[-1] <= LARGEST_BATCHED:
        values, vectors = torch.linalg.eigh(matrices)
        return values, vectors
    values, vectors = eigen_by_threads(matrices.cpu(), _count_threads())
    return values.to(matrices.device), vectors.to(matrices.device)


def eigen_by_threads(matrices: Tensor, threads: int) -> tuple[Tensor, Tensor]:
    """Return the same of matrices [..., n, n] in host memory, an equal part of them by each thread."""
    n = matrices.shape[-1]
    flat = matrices.reshape(-1, n, n)
    if not len(flat):
        return matrices.new_empty(matrices.shape[:-1]), torch.empty_like(matrices)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(torch.linalg.eigh, flat.chunk(threads)))
    values, vectors = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    return values.view(matrices.shape[:-1]), vectors.view(matrices.shape)


def _count_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
