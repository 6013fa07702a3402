"""Sums of rows by span or by another coding of the columns, and the largest numbers of long rows. Shapes as in
``snapshot.py``; n positions, t of the T steps are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

PIECE = 64
"""numbers of a row of which only the largest is looked at first"""
PIECES_EACH = 8
"""pieces for each number that is looked for; shorter rows are sorted at once"""


def by_span(rows: torch.Tensor, owners: Sequence[torch.Tensor], spans: int) -> torch.Tensor:
    """Masses by position [t, l, H_kv, G, n] added over spans [t, l, Hq, S]. owners: of each step the span of each
    position, int64 [>= n]; steps with the same table share one sum."""
    span_sums = []
    for _, run in groupby(range(len(owners)), key=lambda t: id(owners[t])):
        steps = list(run)
        same_table = rows[steps[0] : steps[-1] + 1]
        span_sums.append(sum_by(same_table, owners[steps[0]][: rows.shape[-1]], spans))
    return torch.cat(span_sums).flatten(2, 3)


def sum_by(rows: torch.Tensor, code: torch.Tensor, codes: int) -> torch.Tensor:
    """Add rows [..., n] up over the columns with an equal code, int64 [n] -> [..., codes]."""
    return Coding((code,), (codes,)).sums(rows)[0]


class Coding:
    """Adds up columns of rows by several codings at once. On a CPU columns in a row that are equal in every coding are
    added first, without a copy."""

    def __init__(self, codes: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        """codes: int64 [n] each, below its size."""
        self._codes, self._sizes, self._starts = codes, sizes, None
        if not codes[0].is_cuda:
            changes = np.any([np.diff(code.numpy(), prepend=-1) for code in codes], 0)
            self._starts = np.flatnonzero(changes)
            self._codes = [code[self._starts] for code in codes]

    def sums(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sums of rows [..., n] by each coding [..., size]."""
        if self._starts is not None:
            rows = torch.from_numpy(np.add.reduceat(rows.numpy(), self._starts, axis=-1))
        outs = tuple(rows.new_zeros(*rows.shape[:-1], size) for size in self._sizes)
        for out, code in zip(outs, self._codes, strict=True):
            out.index_add_(-1, code, rows)
        return outs


def find_largest(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row [..., n], in order, and their places. Of a long row they are looked for in
    as many of the pieces that it is cut into, those with the largest maxima, and in what is left behind them."""
    pieces = rows.shape[-1] // PIECE
    if pieces <= PIECES_EACH * count:
        largest = rows.topk(count, -1)
        return largest.values, largest.indices
    cut, start, first_rest = rows[..., : pieces * PIECE].unflatten(-1, (pieces, PIECE)), count * PIECE, pieces * PIECE
    best = cut.amax(-1).topk(count, -1).indices
    candidates = cut.gather(-2, best[..., None].expand(*best.shape, PIECE)).flatten(-2)
    largest = torch.cat((candidates, rows[..., first_rest:]), -1).topk(count, -1)
    indices = largest.indices
    in_pieces = best.gather(-1, (indices // PIECE).clamp(max=count - 1)) * PIECE + indices % PIECE
    return largest.values, torch.where(indices < start, in_pieces, first_rest + indices - start)
