"""Full attention by span beside the method's: of a run's own queries over the exact keys of every position, and full
KV's own; what of the former was attended exactly. Shapes as in ``snapshot.py``; full attention is [L, H_kv, T, G, n], n
positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kvlens.instruments import Oracle
from kvlens.kernels.attend import attention_weights
from kvlens.memory.slots import EXACT, WINDOW
from kvlens.recording.selected import by_span, read_positions
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.rows import SpanRow

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
    """[L, H_kv, T, G, n] of consecutive steps, 0 on positions a step had not written."""
    weights: torch.Tensor | None = None
    for number, layer in enumerate(layers_attention(shots)):
        weights = layer.new_empty(len(shots[0].q), *layer.shape) if weights is None else weights
        weights[number] = layer
    assert weights is not None, "a model has layers"
    return weights


def layers_attention(shots: Sequence[Snapshot]) -> Iterator[torch.Tensor]:
    """Yield full attention [H_kv, T, G, n] of consecutive steps, layer by layer, 0 on positions a step had not written.
    The steps' queries share one product with the keys: what a layer needs fits a processor's cache, and keys of 16 bits
    are never all there in float32."""
    keys = [shot.shadow if shot.keys is None else shot.keys for shot in shots]
    longest = keys[-1]
    assert longest is not None
    layers, kv_heads, n, head_dim = longest.shape
    q = torch.stack([shot.q for shot in shots], 1).unflatten(2, (kv_heads, -1)).transpose(1, 2)
    steps, group = q.shape[2:4]
    token_counts = torch.tensor([each.shape[2] for each in keys if each is not None], device=longest.device)
    unwritten = (torch.arange(n, device=longest.device) >= token_counts[:, None]).repeat_interleave(group, 0)
    bias = unwritten.new_zeros(unwritten.shape, dtype=torch.float32).masked_fill(unwritten, -math.inf)
    rows = q.reshape(layers, -1, head_dim)
    if shots[0].forms:
        yield from _formed(shots[0], rows, longest, bias, token_counts, group)
        return
    for part in zip(rows, longest, strict=True):
        weights = attention_weights(*part, bias if steps > 1 else None, shots[0].scaling)
        yield weights.unflatten(1, (steps, group))


def _formed(
    shot: Snapshot, rows: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor, group: int
) -> Iterator[torch.Tensor]:
    """Yield full attention [H_kv, T, G, n] of each layer by its form. rows [L, H_kv * T * G, D], keys [L, H_kv, n,
    D], bias [T * G, n] -inf on unwritten positions, counts [T]: positions written."""
    kv_heads, n = keys.shape[1:3]
    position = torch.arange(n, device=keys.device)
    for form, q, layer_keys in zip(shot.forms, rows, keys, strict=True):
        scores = form.cap(q.view(kv_heads, -1, q.shape[-1]).float() @ layer_keys.float().mT * shot.scaling) + bias
        scores = scores.unflatten(1, (-1, group))
        if form.window:
            old = position < (counts - form.window)[:, None]
            scores = scores.masked_fill(old[:, None], -math.inf)
        yield form.weigh(scores.transpose(1, 2)).transpose(1, 2)


def coverage(full: torch.Tensor, groups: Sequence[Attended]) -> torch.Tensor:
    """Share of full attention's mass [T, L, Hq] on positions whose tokens the query head attended exactly. groups: of T
    steps each. A slot that holds no token yet may have any position: -1, or the position of a token still to be
    decoded."""
    covered, first_layer, steps, last = [], 0, full.shape[2], full.shape[-1] - 1
    for group in groups:
        exact = torch.isin(group.role, torch.tensor(EXACT, dtype=group.role.dtype, device=group.role.device))
        attended = exact[:, :, None].expand_as(group.weights)
        if group.bias is not None:
            attended = attended & (group.bias > -math.inf)
        attended = attended.unflatten(0, (steps, -1))
        layers = attended.shape[1]
        where = group.position.long().clamp(0, last).unflatten(0, (steps, -1))[:, :, :, None].expand_as(attended)
        mass = full[first_layer : first_layer + layers].movedim(2, 0).gather(-1, where)
        covered.append(torch.where(attended, mass, 0.0).sum(-1).flatten(2, 3))
        first_layer += layers
    return torch.cat(covered, 1)


def compare(
    shots: Sequence[Snapshot],
    full: torch.Tensor | None,
    mass: torch.Tensor,
    groups: Sequence[Attended] | None,
    top_k: int,
) -> tuple[list[Oracle | None], list[dict[str, np.ndarray]], list[float]]:
    """Per step: the `top_k` spans with most own-query mass or most of full KV's own; the columns regret, unread and,
    where full KV's own attention is there, reference_regret and reference_unread, float32 [L, Hq] (NaN in layers that
    were not sampled), in total over all spans; and the largest |sum of full attention - 1|. None, no columns and 0 at
    steps that were not sampled.

    mass: the method's mass by span [T, L, Hq, S]; groups: of T steps each. full, groups: None: every query head
    attended every position exactly, so that `mass` is full attention's.
    """
    oracles: list[Oracle | None] = [None] * len(shots)
    columns: list[dict[str, np.ndarray]] = [{} for _ in shots]
    worst = [0.0] * len(shots)
    steps = [t for t, shot in enumerate(shots) if shot.sampled]
    if not steps:
        return oracles, columns, worst
    layers = list(shots[steps[0]].sampled)
    last_shadow = shots[-1].shadow
    assert last_shadow is not None, "full attention by span needs the keys of all positions"
    n = last_shadow.shape[2]
    owners = [owner for t in steps if (owner := shots[t].owner) is not None]
    read_mass, read = _some(mass, 1, layers, 0, steps), None
    if groups is None or full is None:
        by_query = [_Masses(read_mass, torch.zeros_like(read_mass), None)]
    else:
        read = read_positions(groups, len(shots), steps, torch.stack([owner[:n] for owner in owners]))
        read = _some(read, 1, layers)
        own_mass = _some(full, 0, layers, 2, steps).movedim(2, 0)
        by_query = [_Masses.sum_spans(own_mass, read, owners, mass.shape[-1])]
    if (attention := _reference(shots, steps, n)) is not None:
        by_query.append(_Masses.sum_spans(attention, read, owners, mass.shape[-1]))
    lacking = (by_query[0].spans - read_mass).clamp(min=0) / by_query[0].spans.clamp(min=1e-12)
    most = torch.stack([masses.spans for masses in by_query]).amax(0)
    top = most.topk(min(top_k, most.shape[-1]), -1)
    sinks = [bool(shots[0].forms) and shots[0].forms[layer].sinks is not None for layer in layers]
    errors = torch.stack([masses.errors(sinks) for masses in by_query]).amax(0).tolist()
    tables: dict[str, tuple[torch.Tensor, float]] = {
        "span": (torch.where(top.values > 0, top.indices, -1).int(), -1),
        "mass": (read_mass.gather(-1, top.indices), 0.0),
    }
    totals: dict[str, torch.Tensor] = {}
    named = min(LOST_TOKENS, n)
    for masses, (name, tail, prefix) in zip(by_query, _NAMES, strict=False):
        tables |= {name: (masses.spans.gather(-1, top.indices), 0.0), tail: (masses.tail(top.indices), math.nan)}
        tables |= {f"{prefix}{key}": table for key, table in masses.tables(top.indices, named).items()}
        totals |= {f"{prefix}regret": masses.regret(read_mass, lacking), f"{prefix}unread": masses.unread.sum(-1)}
    arrays = {name: _whole(*table, layers, mass.shape[1]) for name, table in tables.items()}
    sums = {name: _whole(total, math.nan, layers, mass.shape[1]) for name, total in totals.items()}
    for place, t in enumerate(steps):
        oracles[t] = Oracle(**{name: array[place] for name, array in arrays.items()})
        columns[t] = {name: array[place] for name, array in sums.items()}
        worst[t] = errors[place]
    return oracles, columns, worst


_NAMES = (("full", "tail_full", ""), ("reference", "tail_reference", "reference_"))
"""fields of Oracle for the mass on listed spans and on the others, and how the other fields and the columns begin"""


@dataclass(frozen=True)
class _Masses:
    """Full attention by some query: on spans, on the unread tokens of spans [t, l, Hq, S], and on unread tokens [t, l,
    H_kv, G, n]."""

    spans: torch.Tensor
    unread: torch.Tensor
    lost: torch.Tensor | None
    """None: no token was unread"""

    @classmethod
    def sum_spans(
        cls, attention: torch.Tensor, read: torch.Tensor | None, owners: Sequence[torch.Tensor], spans: int
    ) -> _Masses:
        """attention, read [t, l, H_kv, G, n], None: all was read; spans: S."""
        sums = by_span(attention, owners, spans)
        if read is None:
            return cls(sums, torch.zeros_like(sums), None)
        lost = attention.masked_fill(read, 0.0)
        return cls(sums, by_span(lost, owners, spans), lost)

    def regret(self, read_mass: torch.Tensor, lacking: torch.Tensor) -> torch.Tensor:
        """What the method missed in all [t, l, Hq]. read_mass: the method's mass; lacking: of the own-query mass the
        share that it lacks [t, l, Hq, S]. A span that was read as full attention reads it is not missed, however far
        the run's query has drifted from full KV's."""
        missed = torch.minimum((self.spans - read_mass).clamp(min=0), torch.maximum(self.unread, self.spans * lacking))
        return missed.sum(-1)

    def errors(self, sinks: Sequence[bool]) -> torch.Tensor:
        """Largest |sum - 1| of each step [t]; in layers with sink logits, which take a share, largest sum above 1."""
        errors = self.spans.sum(-1) - 1
        short = torch.tensor(sinks, device=errors.device)[:, None]
        return torch.where(short, errors.clamp(min=0), errors.abs()).flatten(1).amax(1)

    def tail(self, listed: torch.Tensor) -> torch.Tensor:
        """Mass [t, l, Hq] on spans that are not listed."""
        return (self.spans.sum(-1) - self.spans.gather(-1, listed).sum(-1)).clamp(min=0)

    def tables(self, listed: torch.Tensor, positions: int) -> dict[str, tuple[torch.Tensor, float]]:
        """Tables [t, l, Hq, ...] beside the listed spans, with what layers hold that were not sampled; positions: lost
        ones that are named."""
        if self.lost is None:
            lost_mass = self.spans.new_zeros(*self.spans.shape[:3], positions)
            lost_pos = torch.full_like(lost_mass, -1, dtype=torch.int32)
        else:
            tokens = self.lost.topk(positions, -1)
            lost_mass = tokens.values.flatten(2, 3)
            lost_pos = torch.where(lost_mass > 0, tokens.indices.flatten(2, 3), -1).int()
        unread = self.unread.gather(-1, listed)
        return {"unread": (unread, 0.0), "lost_pos": (lost_pos, -1), "lost_mass": (lost_mass, 0.0)}


def _reference(shots: Sequence[Snapshot], steps: Sequence[int], n: int) -> torch.Tensor | None:
    """Full KV's own attention [t, l, H_kv, G, n], 0 on positions a step had not written; None: not recorded."""
    rows = [shots[t].reference for t in steps]
    present = [F.pad(row, (0, n - row.shape[-1])) for row in rows if row is not None]
    return torch.stack(present) if len(present) == len(steps) else None


def _some(values: torch.Tensor, *selected: Any) -> torch.Tensor:
    """Return some rows of dimensions: (dimension, ascending rows) one after the other; without a copy where all are
    chosen."""
    for dim, rows in zip(selected[::2], selected[1::2], strict=True):
        if len(rows) < values.shape[dim]:
            values = values.index_select(dim, torch.tensor(rows, device=values.device))
    return values


def _whole(values: torch.Tensor, filling: float, layers: list[int], count: int) -> np.ndarray:
    """Values of some layers [T, l, ...] as [T, L, ...], the others filled."""
    out = values.new_full((len(values), count, *values.shape[2:]), filling)
    out[:, layers] = values
    return out.numpy(force=True)
