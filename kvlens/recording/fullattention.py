"""Full attention of a run's own queries over the exact keys of every position, a layer at a time.

Beside it what a step's heads attended of it: selection recall (how many of the tokens that full attention weighs most
were chosen) and the tokens that a query head attended in some form; sums of rows by span or by another coding of the
columns, and the largest numbers of long rows. Shapes as in ``snapshot.py``; n positions, t of the T steps are sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from kvlens.kernels.attend import form_at
from kvlens.recording.kthlargest import kth_by_partition, kth_by_sorting
from kvlens.recording.layerparts import layer_keys
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.tiers.slots import FREE, ROLE

PIECE = 64
"""numbers of a piece, into which `find_largest` cuts a long row"""
PIECES_EACH = 8
"""pieces of a row for each number that is asked for, from which on the row is cut"""


class FullAttention:
    """Computes full attention of T steps that are measured together. A layer's keys are read once for all steps, in
    parts as they lie. Keys of 16 bits are widened layer by layer. Each call overwrites the tensors that the call before
    it returned, since new memory for each layer costs more time than its product."""

    def __init__(self, shots: Sequence[Snapshot]) -> None:
        """shots: consecutive steps, with the keys of all positions."""
        keys = [shot.shadow if shot.keys is None else shot.keys for shot in shots]
        assert keys[-1] is not None, "full attention needs the keys of all positions"
        self._keys, self._forms, self._scaling = keys[-1], shots[0].forms, shots[0].scaling
        layers, kv_heads, self._n, _ = self._keys.shape
        q = torch.stack([shot.q for shot in shots], 1).unflatten(2, (kv_heads, -1)).transpose(1, 2)
        self._shape = (*q.shape[1:4], self._n)
        self._rows = q.reshape(layers, kv_heads, -1, q.shape[-1]).float()
        """[L, H_kv, T * G, D]"""
        self._written = torch.tensor([each.shape[2] for each in keys if each is not None], device=q.device)
        self._fewest = min(each.shape[2] for each in keys if each is not None)
        self._unwritten = torch.arange(self._fewest, self._n, device=q.device) >= self._written[:, None, None]
        """bool [T, 1, n - fewest]: positions that a step had not written"""
        self._scores = self._rows.new_empty(self._shape)
        self._weights = self._scores.new_empty(0)

    def layers(self, start: int, count: int) -> torch.Tensor:
        """Return full attention of some layers [count, H_kv, T, G, n], 0 on positions a step had not written."""
        if len(self._weights) < count:
            self._weights = self._scores.new_empty(count, *self._shape)
        for layer in range(start, start + count):
            self._weigh(layer, self._weights[layer - start])
        return self._weights[:count]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return full attention of a plain layer [H_kv, T, G, n], and its entropy in nats [H_kv, T, G].

        A weight p with score s has -ln p = m - s - ln max(p), where m is the largest score. The entropy is the mean of
        this over the weights. It needs the logarithm of the largest weight alone."""
        weights, scores = self.layers(layer, 1)[0], self._scores
        scores -= scores.amax(-1, keepdim=True)
        scores[..., self._fewest :].masked_fill_(self._unwritten, 0.0)  # where -inf would meet a weight of 0
        mean_score = weights.flatten(0, 2)[:, None] @ scores.flatten(0, 2)[..., None]
        return weights, -weights.amax(-1).log() - mean_score.view(self._shape[:3])

    def _weigh(self, layer: int, weights: torch.Tensor) -> None:
        """Compute the scores of a layer, and write its weights [H_kv, T, G, n]."""
        scores, start = self._scores, 0
        for part in layer_keys(self._keys, layer):
            if part.shape[1]:
                room = scores.flatten(1, 2)[..., start : start + part.shape[1]]
                torch.baddbmm(room, self._rows[layer], part.float().mT, beta=0, alpha=self._scaling, out=room)
                start += part.shape[1]
        form = form_at(self._forms, layer)
        scores = form.cap(scores)
        scores[..., self._fewest :].masked_fill_(self._unwritten, -math.inf)
        if form.window:
            old = torch.arange(self._n, device=scores.device) < (self._written - form.window)[:, None, None]
            scores = scores.masked_fill(old, -math.inf)
        if form.sinks is None:
            torch.softmax(scores, -1, out=weights)
        else:
            weights.copy_(form.weigh(scores.transpose(1, 2)).transpose(1, 2))


def selection_recall(full: torch.Tensor, groups: Sequence[Attended]) -> torch.Tensor:
    """Share [T, L, Hq] of the k tokens with most of full attention's mass that the query head attended, where k is how
    many tokens it attended; NaN where k = 0.

    A token counts as attended in whatever form it was read, exact, rebuilt or packed; a summary entry is no token. So 1
    is what the best choice of as many tokens reaches, and k / n what a random one does on average. Of tokens with equal
    mass at the k-th place those attended count first. full: [L, H_kv, T, G, n], 0 on positions a step had not written;
    groups: of T steps each.
    """
    steps, start, shares = full.shape[2], 0, []
    for group in groups:
        attended, position = _attended(group, full.shape[-1])
        layers = len(attended) // steps
        mass = full[start : start + layers].movedim(2, 0)
        tables = (table.unflatten(0, (steps, -1)) for table in (attended, position))
        shares.append(_hits(mass, *tables).flatten(2, 3))
        start += layers
    return torch.cat(shares, 1)


def _attended(group: Attended, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [l, H_kv, G, C]: the slot's token was attended, and int64 [l, H_kv, 1, C], its position below n. A token
    counts in one slot only."""
    slot = ((group.role != FREE) & (group.role != ROLE["coarse"]) & (group.position >= 0))[:, :, None]
    slot = slot.expand_as(group.weights)
    if group.visible is not None:
        slot = slot & group.visible
    position = group.position.clamp(0, n - 1).long()[:, :, None]
    if group.share is None:  # the memory keeps a token in one slot
        return slot, position
    marks = torch.zeros(*slot.shape[:-1], n + 1, dtype=torch.bool, device=slot.device)
    marks.scatter_(-1, torch.where(slot, position, n), True)
    return marks[..., :n], torch.arange(n, device=slot.device).expand(*slot.shape[:2], 1, n)


def _hits(mass: torch.Tensor, attended: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Share of the k largest of `mass` [..., G, n] that are attended, k the number attended: attended [..., G, C],
    position [..., 1, C] -> [..., G]."""
    k = attended.sum(-1, dtype=torch.int32).long()
    kth = kth_by_sorting if mass.is_cuda else kth_by_partition
    least, ties = kth(mass, k.clamp(min=1))
    at_slots = mass.gather(-1, position.expand_as(attended))
    above = (attended & (at_slots > least)).sum(-1, dtype=torch.int32)
    even = torch.minimum((attended & (at_slots == least)).sum(-1, dtype=torch.int32), ties)
    return torch.where(k > 0, (above + even) / k, torch.nan)


def read_positions(groups: Sequence[Attended], steps: int, sampled: list[int], owners: torch.Tensor) -> torch.Tensor:
    """Return which positions each query head attended in some form, bool [t, L, H_kv, G, n].

    groups: of `steps` steps each; sampled: steps; owners int64 [t, n]: the span of each position."""
    return torch.cat([_read(group, steps, sampled, owners) for group in groups], 1)


def _read(group: Attended, steps: int, sampled: list[int], owners: torch.Tensor) -> torch.Tensor:
    """bool [t, l, H_kv, G, n]: the position was attended, exactly or rebuilt, or its span's summary was."""
    attended = (group.role != FREE)[:, :, None].expand_as(group.weights)
    if group.visible is not None:
        attended = attended & group.visible
    tables = (attended, group.role[:, :, None], group.position[:, :, None], group.span[:, :, None])
    attended, role, position, span = (table.unflatten(0, (steps, -1))[sampled] for table in tables)
    summary = attended & (role == ROLE["coarse"])
    read = _marked(attended & ~summary & (position >= 0), position, owners.shape[-1])
    if group.summarised is not None:
        read |= group.summarised.unflatten(0, (steps, -1))[sampled][..., : owners.shape[-1]]
    elif summary.any():
        named = _marked(summary, span, int(max(span.max(), owners.max())) + 1)
        read |= named.gather(-1, owners[:, None, None, None].expand(*named.shape[:-1], -1))
    return read


def _marked(where: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """bool [..., size]: true at index [..., 1, C] where bool [..., C] says so."""
    marks = torch.zeros(*where.shape[:-1], size + 1, dtype=torch.bool, device=where.device)
    return marks.scatter_(-1, torch.where(where, index.long(), size), True)[..., :size]


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
    """Adds up columns of rows by several codings at once. On a CPU it first adds neighbouring columns that have equal
    codes in every coding, without a copy."""

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
    """Return the `count` largest numbers of each row [..., n], in order, and their places. A long row is cut into
    pieces. Only the `count` pieces with the largest maxima, and the rest behind the last piece, are searched."""
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
