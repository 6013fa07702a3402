"""Full attention by span beside the method's: of a run's own queries over the exact keys of every position, and full
KV's own; what of the former was attended exactly. Shapes as in ``snapshot.py``; full attention is [L, H_kv, T, G, n], n
positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kvlens.instruments import Oracle
from kvlens.recording.fullattention import by_span, find_largest, read_positions
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.rows import SpanRow
from kvlens.tiers.slots import EXACT, WINDOW

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


def coverage(full: torch.Tensor, groups: Sequence[Attended]) -> torch.Tensor:
    """Share of full attention's mass [T, L, Hq] on positions whose tokens the query head attended exactly. groups: of T
    steps each. A slot that holds no token yet may have any position: -1, or the position of a token still to be
    decoded."""
    covered, first_layer, steps, last = [], 0, full.shape[2], full.shape[-1] - 1
    for group in groups:
        exact = torch.isin(group.role, torch.tensor(EXACT, dtype=group.role.dtype, device=group.role.device))
        attended = exact[:, :, None].expand_as(group.weights)
        if group.visible is not None:
            attended = attended & group.visible
        attended = attended.unflatten(0, (steps, -1))
        layers = attended.shape[1]
        where = group.position.long().clamp(0, last).unflatten(0, (steps, -1))[:, :, :, None].expand_as(attended)
        mass = full[first_layer : first_layer + layers].movedim(2, 0).gather(-1, where)
        covered.append(torch.where(attended, mass, 0.0).sum(-1).flatten(2, 3))
        first_layer += layers
    return torch.cat(covered, 1)


class OracleTables:
    """Collects full attention by span beside the method's, some layers at a time, in the order of the layers."""

    def __init__(self, shots: Sequence[Snapshot], top_k: int) -> None:
        """shots: of T steps; top_k: spans that are listed, with most own-query mass or most of full KV's own."""
        self._shots, self._top_k = shots, top_k
        self._steps = [t for t, shot in enumerate(shots) if shot.sampled]
        self._layers = list(shots[self._steps[0]].sampled) if self._steps else []
        self._parts: list[_Part] = []
        self._count = 0
        """layers so far"""

    def add(self, full: torch.Tensor | None, mass: torch.Tensor, groups: Sequence[Attended] | None) -> None:
        """Take the next l layers. mass: the method's mass by span [T, l, Hq, S]; groups: of T steps each; full [l,
        H_kv, T, G, n]. full, groups: None: every query head attended every position exactly, so that `mass` is full
        attention's."""
        start, steps, shots = self._count, self._steps, self._shots
        self._count += mass.shape[1]
        layers = [layer - start for layer in self._layers if start <= layer < self._count]
        if not layers:
            return
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
        skipped = sum(layer < start for layer in self._layers)
        if (attention := _reference([shots[t].reference for t in steps], skipped, len(layers), n)) is not None:
            by_query.append(_Masses.sum_spans(attention, read, owners, mass.shape[-1]))
        lacking = (by_query[0].spans - read_mass).clamp(min=0) / by_query[0].spans.clamp(min=1e-12)
        most = torch.stack([masses.spans for masses in by_query]).amax(0)
        values, top = most.topk(min(self._top_k, most.shape[-1]), -1)
        forms = shots[0].forms
        sinks = [bool(forms) and forms[start + layer].sinks is not None for layer in layers]
        errors = torch.stack([masses.errors(sinks) for masses in by_query]).amax(0)
        tables: dict[str, tuple[torch.Tensor, float]] = {
            "span": (torch.where(values > 0, top, -1).int(), -1),
            "mass": (read_mass.gather(-1, top), 0.0),
        }
        totals: dict[str, tuple[torch.Tensor, float]] = {}
        named = min(LOST_TOKENS, n)
        for masses, (name, tail, prefix) in zip(by_query, _NAMES, strict=False):
            tables |= {name: (masses.spans.gather(-1, top), 0.0), tail: (masses.tail(top), math.nan)}
            tables |= {f"{prefix}{key}": table for key, table in masses.tables(top, named).items()}
            totals[f"{prefix}regret"] = masses.regret(read_mass, lacking), math.nan
            totals[f"{prefix}unread"] = masses.unread.sum(-1), math.nan
        self._parts.append(_Part(tables, totals, errors))

    def join(self) -> tuple[list[Oracle | None], list[dict[str, np.ndarray]], list[float]]:
        """Return per step: the listed spans; the columns regret, unread and, where full KV's own attention is there,
        reference_regret and reference_unread, float32 [L, Hq] (NaN in layers that were not sampled), in total over all
        spans; and the largest |sum of full attention - 1|. None, no columns and 0 at steps that were not sampled."""
        oracles: list[Oracle | None] = [None] * len(self._shots)
        columns: list[dict[str, np.ndarray]] = [{} for _ in self._shots]
        worst = [0.0] * len(self._shots)
        if not self._parts:
            return oracles, columns, worst
        arrays = self._whole([part.tables for part in self._parts])
        sums = self._whole([part.totals for part in self._parts])
        errors = torch.stack([part.errors for part in self._parts]).amax(0).tolist()
        for place, t in enumerate(self._steps):
            oracles[t] = Oracle(**{name: array[place] for name, array in arrays.items()})
            columns[t] = {name: array[place] for name, array in sums.items()}
            worst[t] = errors[place]
        return oracles, columns, worst

    def _whole(self, parts: Sequence[dict[str, tuple[torch.Tensor, float]]]) -> dict[str, np.ndarray]:
        """Join tables [t, l, ...] of the sampled layers to [t, L, ...], the others filled."""
        whole = {}
        for name, (_, filling) in parts[0].items():
            values = torch.cat([part[name][0] for part in parts], 1)
            out = values.new_full((len(values), self._count, *values.shape[2:]), filling)
            out[:, self._layers] = values
            whole[name] = out.numpy(force=True)
        return whole


@dataclass(frozen=True)
class _Part:
    """Tables and totals [t, l, ...] of some layers, by name, with what layers hold that were not sampled; errors [t]:
    largest |sum of full attention - 1|."""

    tables: dict[str, tuple[torch.Tensor, float]]
    totals: dict[str, tuple[torch.Tensor, float]]
    errors: torch.Tensor


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
            lost_mass, places = (table.flatten(2, 3) for table in find_largest(self.lost, positions))
            lost_pos = torch.where(lost_mass > 0, places, -1).int()
        unread = self.unread.gather(-1, listed)
        return {"unread": (unread, 0.0), "lost_pos": (lost_pos, -1), "lost_mass": (lost_mass, 0.0)}


def _reference(rows: Sequence[torch.Tensor | None], start: int, count: int, n: int) -> torch.Tensor | None:
    """Full KV's own attention [t, count, H_kv, G, n] of the sampled layers from `start` on, 0 on positions a step had
    not written; None: not recorded. rows: of each step [l, H_kv, G, <= n]."""
    present = [F.pad(row[start : start + count], (0, n - row.shape[-1])) for row in rows if row is not None]
    return torch.stack(present) if present and len(present) == len(rows) else None


def _some(values: torch.Tensor, *selected: Any) -> torch.Tensor:
    """Return some rows of dimensions: (dimension, ascending rows) one after the other; without a copy where all are
    chosen."""
    for dim, rows in zip(selected[::2], selected[1::2], strict=True):
        if len(rows) < values.shape[dim]:
            values = values.index_select(dim, torch.tensor(rows, device=values.device))
    return values
