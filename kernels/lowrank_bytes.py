"""What low-rank factors of a span weigh (docs/evidence/kernels.md, Sources: eq. 18, 20). Plain arithmetic, so sizes can
be asked without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Count = TypeVar("Count", int, "torch.Tensor")


def factor_elements(n: int, rank: Count, dim: int) -> Count:
    """Numbers in the factors of an [n, dim] matrix, or of several of `rank` components in all: r (n + d + 1) (eq.
    18)."""
    return rank * (n + dim + 1)


def raw_elements(n: int, dim: int) -> int:
    """Numbers in the exact keys and values of one span and KV head. Factors save where they have fewer."""
    return 2 * n * dim


def factor_bytes(n: int, rank_k: int, rank_v: int, dim: int, itemsize: int) -> int:
    """Bytes of the unit of one span and KV head: what lies in host memory and what a zoom moves (eq. 18, 20)."""
    return (factor_elements(n, rank_k, dim) + factor_elements(n, rank_v, dim)) * itemsize


def raw_bytes(n: int, dim: int, itemsize: int) -> int:
    """Bytes of the exact keys and values of one span and KV head."""
    return raw_elements(n, dim) * itemsize
