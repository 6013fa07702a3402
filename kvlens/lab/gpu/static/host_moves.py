"""Recall led by the host, as a baseline: it waits for each layer's plan, and asks for one copy per page and side, as
papers' baselines do. Such a step cannot be captured in a graph."""

from __future__ import annotations

import torch


def copy_each_page(
    pool: torch.Tensor, unit: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, later: bool
) -> None:
    """As kvlens.lab.gpu.static.recall.fetch, whether anything waits or not: pool [rows, H_kv, 2, P, D], unit int32
    [H_kv, M] (row H_kv + head, -1: none) into cells keys, values [H_kv, M, P, D]."""
    heads = pool.shape[1]
    for head, row in enumerate(unit.tolist()):
        for cell, number in enumerate(row):
            if number >= 0:
                page = pool[number // heads, number % heads]
                keys[head, cell].copy_(page[0], non_blocking=True)
                values[head, cell].copy_(page[1], non_blocking=True)
