"""Sums of rows by group, in the order of the rows on every device.

PyTorch's scatter_add and index_add of real numbers add atomically on CUDA, so two runs of one prompt differ in their
last bits. Tensors only. Shapes: H KV heads, N rows, C groups, D numbers of a row.
"""

from __future__ import annotations

import torch


def sum_by_group(values: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """Add up values [H, N] or [H, N, D] by their group, int64 [H, N] of 0..count-1 -> [H, count] or [H, count, D]. A
    group without rows is 0."""
    if values.device.type == "cpu":
        where = group if values.ndim == 2 else group[..., None].expand(values.shape)
        return values.new_zeros(values.shape[0], count, *values.shape[2:]).scatter_add(1, where, values)
    return sum_sorted(values, group, count)


def sum_sorted(values: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """As `sum_by_group`: rows are sorted by group, and every group's are added up one after the other."""
    ordered = group.argsort(dim=1, stable=True)
    lengths = torch.zeros(len(group), count, dtype=torch.long, device=group.device)
    lengths.scatter_add_(1, group, torch.ones_like(group))
    index = ordered if values.ndim == 2 else ordered[..., None].expand(values.shape)
    return torch.segment_reduce(values.gather(1, index), "sum", lengths=lengths, axis=1, unsafe=True, initial=0.0)
