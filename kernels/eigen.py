"""Eigenvectors of many small symmetric matrices, on the device or by the processor's threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

LARGEST_BATCHED = 32
"""rows up to which torch decomposes a batch on a CUDA device at once; larger matrices go through it one by one"""


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
