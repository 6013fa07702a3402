"""What the device gives up: tokens that a placement does not keep, and, in a bag, single tokens that make room for the
next one. Logs ranks, scores and cuts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from kvlens.memory.hot_tier import FREE, ROLE, HotTier, Pool
from kvlens.memory.ledger import MemoryLog
from kvlens.memory.placement import Eviction, Kept, Placement
from kvlens.memory.span_table import WINDOW, SpanTable
from kvlens.rows import CutRow


def token_names(placement: Placement, positions: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return span ids and role codes of positions, by the spans' ranges; FREE where there is no position."""
    device = positions.device
    starts = torch.tensor([span.tok_start for span in placement.spans], device=device)
    row = (torch.searchsorted(starts, positions.contiguous(), right=True) - 1).clamp(min=0)
    codes = torch.tensor([ROLE[role] for role in placement.roles], device=device)
    nothing = positions < 0
    return torch.tensor(ids, device=device)[row].masked_fill(nothing, 0), codes[row].masked_fill(nothing, FREE)


class Evictions:
    """Owns, for a bag, how many tokens each KV head has left of each span and which tokens give way next."""

    def __init__(self, hot: HotTier, spans: SpanTable, log: MemoryLog) -> None:
        self._hot, self._spans, self._log = hot, spans, log
        size = (hot.shape.layers, hot.shape.kv_heads)
        self._left = np.zeros((*size, spans.capacity), np.int64)
        self._victims: torch.Tensor | None = None
        """int64 [L, H_kv]: places of the bag that the next token takes, -1: one that was never used"""
        self._going = np.zeros(size, bool)

    # ----------------------------------------------------------------------------------------------------- placement
    def log_losses(self, placement: Placement, ids: list[int], end: int) -> None:
        """Log what the ranking dropped of the positions below `end`; of spans that are partial for some KV heads, the
        heads that have nothing left (evict); and of partial and cold spans, the heads that keep all of them on the
        device (kept)."""
        retained = placement.kept
        self._log.cuts(cuts(retained, _owners(placement, ids, range(len(ids)), end), self._log.step))
        if placement.cold is not None:
            self._log_thinned(placement, placement.cold, ids, end)
        layers, heads = retained.positions.shape[:2]
        if (layers, heads) == (1, 1) or not {"partial", "cold"} & set(placement.states):
            return
        spans, role = token_names(placement, retained.positions, ids)
        remaining = torch.zeros(layers, heads, self._spans.capacity, dtype=torch.long, device=spans.device)
        counts = remaining.scatter_add_(2, spans, (role != FREE).long()).tolist()
        away = [pair for pair in zip(ids, placement.states, strict=True) if pair[1] in ("partial", "cold")]
        for layer, head in np.ndindex(layers, heads):
            where = layer if layers > 1 else None, head if heads > 1 else None
            for span, state in away:
                if state == "partial" and counts[layer][head][span] == 0:
                    self._log.event("evict", *where, span)
                elif counts[layer][head][span] == self._spans.host_lengths[span]:
                    self._log.event("kept", *where, span)

    def _log_thinned(self, placement: Placement, cold: Kept, ids: list[int], end: int) -> None:
        """Log what of the offloaded spans did not go to the cold tier, and the KV heads that have nothing there
        (evict)."""
        self._log.cuts(cuts(cold, _owners(placement, ids, placement.offload, end), self._log.step))
        mask = cold.mask(end).expand(self._hot.shape.layers, self._hot.shape.kv_heads, end).cpu()
        for number in placement.offload:
            span = placement.spans[number]
            remains = mask[..., span.tok_start : span.tok_end].any(-1)
            for layer, head in (~remains).nonzero().tolist():
                self._log.event("evict", layer, head, ids[number])

    def log_dense(self, placement: Placement, ids: list[int]) -> None:
        """Log that dense layers keep all of the spans that others give away."""
        away = [span for span, state in zip(ids, placement.states, strict=True) if state != "resident"]
        for pool in self._hot.pools if away else ():
            whole = len(pool.heads) == self._hot.shape.kv_heads
            for layer in pool.layers if pool.dense else ():
                for head in (None,) if whole else pool.heads:
                    for span in away:
                        self._log.event("kept", layer, head, span)

    # --------------------------------------------------------------------------------------------------------- a bag
    def count(self, pool: Pool, spans: torch.Tensor, role: torch.Tensor) -> None:
        """Count tokens that were placed in a bag: spans, role [l, h, m]."""
        counts = torch.zeros(*spans.shape[:2], self._spans.capacity, dtype=torch.long, device=spans.device)
        counts.scatter_add_(2, spans, (role != FREE).long())
        self._left[pool.index] += counts.cpu().numpy()

    def name(self, ids: list[int], roles: list[str]) -> None:
        """Name tokens of the bag, until now the window's, as tokens of the newest spans `ids`. No token moves."""
        for span, role in zip(ids, roles, strict=True):
            row = self._spans.rows[span]
            for pool in self._hot.pools:
                in_span = (pool.position >= row.tok_start) & (pool.position < row.tok_end) & (pool.span == WINDOW)
                pool.span.masked_fill_(in_span, span)
                pool.role.masked_fill_(in_span, ROLE[role])
                self._left[(*pool.index, span)] = in_span.sum(-1).cpu().numpy()
            remaining = self._left[:, :, span]
            for layer, head in np.argwhere(remaining < self._spans.host_lengths[span]).tolist():
                self._log.event("thin" if remaining[layer, head] else "evict", layer, head, span)

    def evict(self, eviction: Eviction) -> None:
        """Log the tokens that give way to the next one; it overwrites them when it is fed."""
        places = self._victims = eviction.places
        position, span = torch.empty_like(places), torch.empty_like(places)
        for pool in self._hot.pools:
            slots = (places[pool.index].clamp(min=0) + pool.start["window"])[..., None]
            position[pool.index] = pool.position.gather(2, slots)[..., 0].long()
            span[pool.index] = pool.span.gather(2, slots)[..., 0].long()
        where, spans, going = position.cpu().numpy(), span.cpu().numpy(), (places >= 0).cpu().numpy()
        self._going = going
        layers, heads = np.nonzero(going)
        self._left[layers, heads, spans[going]] -= 1
        alike = bool(going.all() and (where == where[0, 0]).all()) and eviction.score is None
        units = [(0, 0)] if alike else list(zip(layers.tolist(), heads.tolist(), strict=True))
        score, cut = ((None if t is None else t.float().cpu().numpy()) for t in (eviction.score, eviction.cut))
        unit = np.ones(1, np.int32)
        rows = []
        for layer, head in units:
            named_layer, named_head = (None, None) if alike else (layer, head)
            self._log_thinner(
                named_layer, named_head, int(spans[layer, head]), int(self._left[layer, head, spans[layer, head]])
            )
            rows.append(
                CutRow(
                    self._log.step,
                    named_layer,
                    named_head,
                    eviction.candidates,
                    max(eviction.candidates - 1, 0),
                    float("nan") if cut is None else float(cut[layer, head]),
                    spans[layer, head : head + 1].astype(np.int32),
                    unit,
                    where[layer, head : head + 1].astype(np.int32),
                    unit * eviction.candidates,
                    np.full(1, np.nan, np.float32)
                    if score is None
                    else score[layer, head : head + 1].astype(np.float32),
                )
            )
        self._log.cuts(rows)

    def _log_thinner(self, layer: int | None, kv_head: int | None, span: int, remaining: int) -> None:
        """Log that a span lost a token: 'thin' with the first one, 'evict' with the last one."""
        if span != WINDOW and remaining == 0:
            self._log.event("evict", layer, kv_head, span)
        elif span != WINDOW and remaining == self._spans.host_lengths[span] - 1:
            self._log.event("thin", layer, kv_head, span)

    def take(self, position: int) -> None:
        """Give the token at `position` its slot in every bag."""
        victims, self._victims = self._victims, None
        for pool in self._hot.pools:
            full = victims is not None and self._going[pool.index].any()
            pool.take_bag(victims[pool.index] if victims is not None and full else None, position, WINDOW)


def _owners(placement: Placement, ids: list[int], selected: Iterable[int], end: int) -> torch.Tensor:
    """Return int64 [end]: the id of the chosen span that each position is in, -1 where none is."""
    owner = torch.full((end,), -1, dtype=torch.long)
    for number in selected:
        owner[placement.spans[number].tok_start : placement.spans[number].tok_end] = ids[number]
    return owner


def cuts(retained: Kept, owner: torch.Tensor, step: int) -> list[CutRow]:
    """What was dropped of each span, and where the best of it stood in the ranking: one row per (layer, KV head), with
    None for a dimension in which all are alike. owner int64 [n]: span id of each position, -1 where the position lies
    in the window. Empty where the method ranks nothing.
    """
    if retained.score is None and not retained.newest:
        return []
    n = len(owner)
    score = torch.arange(n)[None, None] if retained.score is None else retained.score[..., :n]
    size = torch.broadcast_shapes(score.shape[:2], retained.positions.shape[:2])
    mask = retained.mask(n).expand(*size, n).cpu().numpy()
    scores, owners = score.float().expand(*size, n).cpu().numpy(), owner.cpu().numpy()
    rows = []
    for layer in range(size[0]):
        for head in range(size[1]):
            where = (layer if size[0] > 1 else None, head if size[1] > 1 else None)
            row = _cut(step, *where, scores[layer, head], mask[layer, head], owners)
            if row is not None:
                rows.append(_by_position(row) if retained.score is None else row)
    return rows


def _by_position(row: CutRow) -> CutRow:
    """A cut whose scores were positions."""
    return replace(row, cut=float("nan"), score=np.full_like(row.score, np.nan))


def _cut(
    step: int, layer: int | None, kv_head: int | None, score: np.ndarray, retained: np.ndarray, owner: np.ndarray
) -> CutRow | None:
    """Of one KV head, score float32, retained bool and owner int64 [n]. None: it lost nothing that was ranked."""
    ranked = ~np.isnan(score)
    dropped = np.flatnonzero(ranked & ~retained & (owner >= 0))
    if not len(dropped):
        return None
    order = np.argsort(-score[ranked], kind="stable")
    rank = np.zeros(len(score), np.int64)
    rank[np.flatnonzero(ranked)[order]] = np.arange(1, len(order) + 1)
    best_first = dropped[np.argsort(rank[dropped])]
    spans, best_places, counts = np.unique(owner[best_first], return_index=True, return_counts=True)
    positions = best_first[best_places]
    stayed = score[ranked & retained]
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
        pos=positions.astype(np.int32),
        rank=rank[positions].astype(np.int32),
        score=score[positions].astype(np.float32),
    )
