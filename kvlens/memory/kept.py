"""Which tokens stay on the device at full resolution, per layer and KV head, and what the method ranked them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvlens.rows import CutRow


@dataclass(frozen=True)
class Kept:
    """Positions that stay, ragged over layers and KV heads. A dimension of size 1 speaks for all layers or KV heads."""

    positions: torch.Tensor
    """int64 [L|1, H_kv|1, m], ascending, -1 behind the last one where a KV head keeps fewer"""
    score: torch.Tensor | None = None
    """float32 [L|1, H_kv|1, n] of the positions from 0 on: by which they were ranked, the highest kept; NaN: not
    ranked, kept for a reason of its own or gone without a comparison. None: the method ranks nothing"""
    newest: bool = False
    """what is not kept went since it is old: logged as ranked by position, without scores"""

    @classmethod
    def everywhere(cls, positions: torch.Tensor, score: torch.Tensor | None = None) -> Kept:
        """The same positions [m] for every layer and KV head."""
        return cls(positions[None, None], score)

    @classmethod
    def ragged(
        cls, positions: Sequence[Sequence[torch.Tensor]], score: torch.Tensor | None = None, newest: bool = False
    ) -> Kept:
        """positions[layer][KV head]: int64 [m of it], ascending; a layer with one entry speaks for all its KV heads."""
        most = max((len(head) for layer in positions for head in layer), default=0)
        device = positions[0][0].device
        table = torch.full((len(positions), len(positions[0]), most), -1, dtype=torch.long, device=device)
        for at, layer in enumerate(positions):
            for head, kept in enumerate(layer):
                table[at, head, : len(kept)] = kept
        return cls(table, score, newest)

    @classmethod
    def masked(cls, mask: torch.Tensor, score: torch.Tensor | None = None) -> Kept:
        """The positions where mask bool [L|1, H_kv|1, n] is true."""
        n = mask.shape[-1]
        order = torch.where(mask, torch.arange(n, device=mask.device), n).sort(-1).values
        order = order[..., : int(mask.sum(-1).max())] if mask.numel() else order
        return cls(torch.where(order < n, order, -1), score)

    def of(self, layers: slice, heads: slice) -> torch.Tensor:
        """The positions of some layers and KV heads, int64 [l|1, h|1, m], without columns that none of them fills."""
        positions = self.positions
        if positions.shape[0] > 1:
            positions = positions[layers]
        if positions.shape[1] > 1:
            positions = positions[:, heads]
        most = int((positions >= 0).sum(-1).max()) if positions.numel() else 0
        return positions[..., :most]

    def mask(self, n: int) -> torch.Tensor:
        """bool [L|1, H_kv|1, n]: kept."""
        size = (*self.positions.shape[:2], n + 1)
        found = torch.zeros(size, dtype=torch.bool, device=self.positions.device)
        return found.scatter_(2, torch.where(self.positions < 0, n, self.positions), True)[..., :n]


def cuts(kept: Kept, owner: torch.Tensor, step: int) -> list[CutRow]:
    """What was dropped of each span, and where the best of it stood in the ranking: one row per (layer, KV head), with
    None for a dimension in which all are alike. owner int64 [n]: span id of each position, -1 where the position lies
    in the window. Empty where the method ranks nothing.
    """
    if kept.score is None and not kept.newest:
        return []
    n = len(owner)
    score = torch.arange(n)[None, None] if kept.score is None else kept.score[..., :n]
    size = torch.broadcast_shapes(score.shape[:2], kept.positions.shape[:2])
    mask = kept.mask(n).expand(*size, n).cpu().numpy()
    scores, owners = score.float().expand(*size, n).cpu().numpy(), owner.cpu().numpy()
    rows = []
    for layer in range(size[0]):
        for head in range(size[1]):
            where = (layer if size[0] > 1 else None, head if size[1] > 1 else None)
            row = _cut(step, *where, scores[layer, head], mask[layer, head], owners)
            if row is not None:
                rows.append(_by_position(row) if kept.score is None else row)
    return rows


def _by_position(row: CutRow) -> CutRow:
    """A cut whose scores were positions."""
    return replace(row, cut=float("nan"), score=np.full_like(row.score, np.nan))


def _cut(
    step: int, layer: int | None, kv_head: int | None, score: np.ndarray, kept: np.ndarray, owner: np.ndarray
) -> CutRow | None:
    """Of one KV head, score float32, kept bool and owner int64 [n]. None: it lost nothing that was ranked."""
    ranked = ~np.isnan(score)
    dropped = np.flatnonzero(ranked & ~kept & (owner >= 0))
    if not len(dropped):
        return None
    order = np.argsort(-score[ranked], kind="stable")
    rank = np.zeros(len(score), np.int64)
    rank[np.flatnonzero(ranked)[order]] = np.arange(1, len(order) + 1)
    best_first = dropped[np.argsort(rank[dropped])]
    spans, first, counts = np.unique(owner[best_first], return_index=True, return_counts=True)
    at = best_first[first]
    stayed = score[ranked & kept]
    cut = float(stayed.min()) if len(stayed) else float("nan")
    return CutRow(
        step=step,
        layer=layer,
        kv_head=kv_head,
        candidates=int(ranked.sum()),
        kept=len(stayed),
        cut=cut,
        span=spans.astype(np.int32),
        dropped=counts.astype(np.int32),
        pos=at.astype(np.int32),
        rank=rank[at].astype(np.int32),
        score=score[at].astype(np.float32),
    )
