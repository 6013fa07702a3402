"""What low-rank factors of a span weigh (eq. 18, 20: docs/kernels.md, Sources). Plain arithmetic, so that sizes can
be asked without torch."""

from __future__ import annotations


def factor_elements(n: int, rank: int, dim: int) -> int:
    """Numbers in the factors of one [n, dim] matrix: r (n + d + 1) (eq. 18)."""
    return rank * (n + dim + 1)


def factor_bytes(n: int, rank_k: int, rank_v: int, dim: int, itemsize: int) -> int:
    """Bytes of the unit of one span and KV head: what lies in host memory and what a zoom moves (eq. 18, 20)."""
    return (factor_elements(n, rank_k, dim) + factor_elements(n, rank_v, dim)) * itemsize


def raw_bytes(n: int, dim: int, itemsize: int) -> int:
    """Bytes of the exact keys and values of one span and KV head."""
    return 2 * n * dim * itemsize


def smaller_form(n: int, rank_k: int, rank_v: int, dim: int) -> str:
    """'factors' when they are smaller than the exact span, else 'raw' (the saving needs r (n + d + 1) < n d)."""
    factors = factor_elements(n, rank_k, dim) + factor_elements(n, rank_v, dim)
    return "factors" if factors < 2 * n * dim else "raw"
