"""Full attention of a run's own queries over the exact keys of every position: what of it was attended exactly, and how
it lies on spans beside the method's. Shapes as in ``snapshot.py``; full attention is [L, H_kv, T, G, n], n positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from kvlens.instruments import Oracle
from kvlens.kernels.attend import attention_weights
from kvlens.memory.hot import ROLE
from kvlens.memory.spantable import WINDOW
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.rows import SpanRow

EXACT = (ROLE["sink"], ROLE["anchor"], ROLE["window"], ROLE["resident"])
"""Roles whose entries are attended exactly, for coverage."""


class Owners:
    """Which span each position belongs to, as spans are born. Tensors once handed out do not change."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.table = torch.full((positions,), WINDOW, dtype=torch.long, device=device)
        self._known = 0

    def follow(self, rows: Sequence[SpanRow]) -> torch.Tensor:
        """int64 [positions] after all of `rows`, the run's spans so far; the window has the positions that no other
        span has."""
        new, self._known = rows[self._known :], len(rows)
        if new:
            self.table = self.table.clone()
        for row in new:
            if row.span != WINDOW:
                self.table[row.tok_start : row.tok_end] = row.span
        return self.table


def full_attention(shots: Sequence[Snapshot]) -> torch.Tensor:
    """[L, H_kv, T, G, n] of consecutive steps, 0 on positions a step had not written. Their queries share one product
    with the keys."""
    longest = shots[-1].shadow
    assert longest is not None
    layers, kv_heads, n, head_dim = longest.shape
    q = torch.stack([shot.q for shot in shots], 1).unflatten(2, (kv_heads, -1)).transpose(1, 2)
    steps, group = q.shape[2:4]
    seen = torch.tensor([shot.shadow.shape[2] for shot in shots if shot.shadow is not None], device=longest.device)
    unwritten = (torch.arange(n, device=longest.device) >= seen[:, None]).repeat_interleave(group, 0)
    bias = unwritten.new_zeros(unwritten.shape, dtype=torch.float32).masked_fill(unwritten, -math.inf)
    weights = attention_weights(q.reshape(layers, -1, head_dim), longest, bias, shots[0].scaling)
    return weights.unflatten(2, (steps, group))


def coverage(full: torch.Tensor, groups: Sequence[Attended]) -> torch.Tensor:
    """Share of full attention's mass [T, L, Hq] on positions whose tokens the query head attended exactly. groups: of T
    steps each."""
    covered, first, steps = [], 0, full.shape[2]
    for group in groups:
        exact = torch.isin(group.role, torch.tensor(EXACT, dtype=group.role.dtype, device=group.role.device))
        attended = exact[:, :, None].expand_as(group.weights)
        if group.bias is not None:
            attended = attended & (group.bias > -math.inf)
        attended = attended.unflatten(0, (steps, -1))
        layers = attended.shape[1]
        where = group.position.long().clamp(min=0).unflatten(0, (steps, -1))[:, :, :, None].expand_as(attended)
        mass = full[first : first + layers].movedim(2, 0).gather(-1, where)
        covered.append(torch.where(attended, mass, 0.0).sum(-1).flatten(2, 3))
        first += layers
    return torch.cat(covered, 1)


def compare(
    shots: Sequence[Snapshot], full: torch.Tensor, mass: torch.Tensor, top_k: int
) -> tuple[list[Oracle | None], list[np.ndarray | None], list[float]]:
    """Per step: the `top_k` spans of full attention, total regret float32 [L, Hq] (NaN in layers that were not
    sampled), and the largest |sum of full attention - 1|. None, None, 0 at steps that were not sampled.

    mass: the method's mass by span [T, L, Hq, S].
    """
    nothing: tuple[list[Oracle | None], list[np.ndarray | None], list[float]] = (
        [None] * len(shots),
        [None] * len(shots),
        [0.0] * len(shots),
    )
    oracles, regrets, worst = nothing
    steps = [t for t, shot in enumerate(shots) if shot.sampled]
    if not steps:
        return nothing
    layers = list(shots[steps[0]].sampled)
    spans = _by_span(shots, full, steps, layers, mass.shape[-1])
    own = mass[steps][:, layers]
    missed = (spans - own).clamp(min=0).sum(-1)
    top = spans.topk(min(top_k, spans.shape[-1]), -1)
    total = spans.sum(-1)
    errors = (total - 1).abs().flatten(1).amax(1).tolist()
    columns = (
        (torch.where(top.values > 0, top.indices, -1).int(), -1),
        (top.values, 0.0),
        (own.gather(-1, top.indices), 0.0),
        ((total - top.values.sum(-1)).clamp(min=0), math.nan),
        (missed, math.nan),
    )
    arrays = [_whole(column, filling, layers, mass.shape[1]) for column, filling in columns]
    for place, t in enumerate(steps):
        span, listed, read, tail, regret = (array[place] for array in arrays)
        oracles[t], regrets[t], worst[t] = Oracle(span, listed, read, tail), regret, errors[place]
    return oracles, regrets, worst


def _by_span(
    shots: Sequence[Snapshot], full: torch.Tensor, steps: list[int], layers: list[int], spans: int
) -> torch.Tensor:
    """Full attention's mass by span [T', l, Hq, S] of the sampled steps and layers."""
    full = full if layers == list(range(len(full))) else full[layers]
    found = []
    for _, run in groupby(steps, key=lambda t: id(shots[t].owner)):
        at = list(run)
        owner = shots[at[0]].owner
        assert owner is not None
        rows = full[:, :, at]
        flat = rows.flatten(0, 3).t().contiguous()  # positions first: whole rows are added
        sums = flat.new_zeros(spans, flat.shape[1]).index_add_(0, owner[: len(flat)], flat)
        found.append(sums.t().unflatten(0, rows.shape[:-1]).movedim(2, 0))
    return torch.cat(found).flatten(2, 3)


def _whole(values: torch.Tensor, filling: float, layers: list[int], count: int) -> np.ndarray:
    """Values of some layers [T, l, ...] as [T, L, ...], the others filled."""
    out = values.new_full((len(values), count, *values.shape[2:]), filling)
    out[:, layers] = values
    return out.numpy(force=True)
