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
from kvlens.memory.hot_tier import ROLE
from kvlens.memory.span_table import WINDOW
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.recording.unread import unread
from kvlens.rows import SpanRow

EXACT = (ROLE["sink"], ROLE["anchor"], ROLE["window"], ROLE["resident"])
"""Roles whose entries are attended exactly, for coverage."""
LOST_TOKENS = 8
"""tokens that are named, per query head, of those that full attention wanted and that were not read"""


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
    steps each. A slot that holds no token yet may have any position: -1, or the position of a token still to be
    decoded."""
    covered, first, steps, last = [], 0, full.shape[2], full.shape[-1] - 1
    for group in groups:
        exact = torch.isin(group.role, torch.tensor(EXACT, dtype=group.role.dtype, device=group.role.device))
        attended = exact[:, :, None].expand_as(group.weights)
        if group.bias is not None:
            attended = attended & (group.bias > -math.inf)
        attended = attended.unflatten(0, (steps, -1))
        layers = attended.shape[1]
        where = group.position.long().clamp(0, last).unflatten(0, (steps, -1))[:, :, :, None].expand_as(attended)
        mass = full[first : first + layers].movedim(2, 0).gather(-1, where)
        covered.append(torch.where(attended, mass, 0.0).sum(-1).flatten(2, 3))
        first += layers
    return torch.cat(covered, 1)


def compare(
    shots: Sequence[Snapshot], full: torch.Tensor, mass: torch.Tensor, groups: Sequence[Attended], top_k: int
) -> tuple[list[Oracle | None], list[dict[str, np.ndarray]], list[float]]:
    """Per step: the `top_k` spans of full attention; the columns regret and unread float32 [L, Hq] (NaN in layers that
    were not sampled), in total over all spans; and the largest |sum of full attention - 1|. None, no columns and 0 at
    steps that were not sampled.

    mass: the method's mass by span [T, L, Hq, S]; groups: of T steps each.
    """
    oracles: list[Oracle | None] = [None] * len(shots)
    columns: list[dict[str, np.ndarray]] = [{} for _ in shots]
    worst = [0.0] * len(shots)
    steps = [t for t, shot in enumerate(shots) if shot.sampled]
    if not steps:
        return oracles, columns, worst
    layers = list(shots[steps[0]].sampled)
    n = full.shape[-1]
    owners = [owner for t in steps if (owner := shots[t].owner) is not None]
    each = torch.stack([owner[:n] for owner in owners])
    lost = unread(full[:, :, steps], groups, len(shots), steps, each)[:, layers]
    wanted = full[layers][:, :, steps].movedim(2, 0)
    spans, gone = (by_span(rows, owners, mass.shape[-1]) for rows in (wanted, lost))
    own = mass[steps][:, layers]
    missed = (spans - own).clamp(min=0).sum(-1)
    top = spans.topk(min(top_k, spans.shape[-1]), -1)
    tokens = lost.flatten(2, 3).topk(min(LOST_TOKENS, n), -1)
    total = spans.sum(-1)
    errors = (total - 1).abs().flatten(1).amax(1).tolist()
    tables = (
        (torch.where(top.values > 0, top.indices, -1).int(), -1),
        (top.values, 0.0),
        (own.gather(-1, top.indices), 0.0),
        ((total - top.values.sum(-1)).clamp(min=0), math.nan),
        (gone.gather(-1, top.indices), 0.0),
        (torch.where(tokens.values > 0, tokens.indices, -1).int(), -1),
        (tokens.values, 0.0),
        (missed, math.nan),
        (gone.sum(-1), math.nan),
    )
    arrays = [_whole(table, filling, layers, mass.shape[1]) for table, filling in tables]
    for place, t in enumerate(steps):
        *listed, regret, lost_in_all = (array[place] for array in arrays)
        oracles[t], worst[t] = Oracle(*listed), errors[place]
        columns[t] = {"regret": regret, "unread": lost_in_all}
    return oracles, columns, worst


def by_span(rows: torch.Tensor, owners: Sequence[torch.Tensor], spans: int) -> torch.Tensor:
    """Masses by position [t, l, H_kv, G, n] added over spans [t, l, Hq, S]. owners: of each step the span of each
    position, int64 [>= n]; steps with the same table share one sum."""
    found = []
    for _, run in groupby(range(len(owners)), key=lambda t: id(owners[t])):
        at = list(run)
        flat = rows[at].flatten(0, 3).t().contiguous()  # positions first: whole rows are added
        sums = flat.new_zeros(spans, flat.shape[1]).index_add_(0, owners[at[0]][: len(flat)], flat)
        found.append(sums.t().unflatten(0, rows[at].shape[:-1]))
    return torch.cat(found).flatten(2, 3)


def _whole(values: torch.Tensor, filling: float, layers: list[int], count: int) -> np.ndarray:
    """Values of some layers [T, l, ...] as [T, L, ...], the others filled."""
    out = values.new_full((len(values), count, *values.shape[2:]), filling)
    out[:, layers] = values
    return out.numpy(force=True)
