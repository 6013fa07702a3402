"""What the device gives up: tokens that a placement does not keep, and, in a bag, single tokens that make room for the
next one. Logs ranks, scores and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvlens.memory.hot_tier import HotTier, Pool
from kvlens.memory.log import MemoryLog, bag_cuts, cuts, owners
from kvlens.memory.placement import Eviction, Kept, Placement
from kvlens.memory.slots import FREE, ROLE, WINDOW, SpanTable


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
        owner = owners(placement, ids, range(len(ids)), end)
        self._log.cuts(partial(cuts, self._unchanging(retained), owner, self._log.step))
        if placement.cold is not None:
            self._log_thinned(placement, placement.cold, ids, end)
        layers, heads = retained.positions.shape[:2]
        away = [pair for pair in zip(ids, placement.states, strict=True) if pair[1] in ("partial", "cold")]
        if (layers, heads) == (1, 1) or not away:
            return
        spans, role = token_names(placement, retained.positions, ids)
        remaining = torch.zeros(layers, heads, self._spans.capacity, dtype=torch.long, device=spans.device)
        span_ids = np.array([span for span, _ in away])
        counts = remaining.scatter_add_(2, spans, (role != FREE).long()).cpu().numpy()[:, :, span_ids]
        empty = (counts == 0) & np.array([state == "partial" for _, state in away])
        whole = ~empty & (counts == self._spans.host_lengths[span_ids])
        for layer in range(layers):
            head, place = np.nonzero(empty[layer] | whole[layer])
            kinds = np.where(empty[layer][head, place], "evict", "kept").tolist()
            head_numbers = head if heads > 1 else np.full(len(head), None)
            self._log.events_of(kinds, layer if layers > 1 else None, head_numbers, span_ids[place])

    def _unchanging(self, retained: Kept) -> Kept:
        """Return what can be read at the end of a step: by then a method may have changed the scores that it handed
        over. Those of the prompt's placement are read at once."""
        if self._log.step < 0:
            return retained
        score = None if retained.score is None else retained.score.clone()
        return replace(retained, positions=retained.positions.clone(), score=score)

    def _log_thinned(self, placement: Placement, cold: Kept, ids: list[int], end: int) -> None:
        """Log what of the offloaded spans did not go to the cold tier, and the KV heads that have nothing there
        (evict)."""
        owner = owners(placement, ids, placement.offload, end)
        self._log.cuts(partial(cuts, self._unchanging(cold), owner, self._log.step))
        size = self._hot.shape.layers, self._hot.shape.kv_heads
        moved = cold.mask(end).cpu().long()
        counts = torch.zeros(*moved.shape[:2], self._spans.capacity + 1, dtype=torch.long)
        counts.index_add_(2, torch.where(owner < 0, self._spans.capacity, owner), moved)
        span_ids = np.array([ids[number] for number in placement.offload], np.int64)
        empty = (counts.expand(*size, -1)[..., span_ids] == 0).numpy()
        for layer in range(size[0]):
            place, head = np.nonzero(empty[layer].T)
            self._log.events_of("evict", layer, head, span_ids[place])

    def log_dense(self, placement: Placement, ids: list[int]) -> None:
        """Log that dense layers keep all of the spans that others give away."""
        away = [span for span, state in zip(ids, placement.states, strict=True) if state != "resident"]
        for pool in self._hot.pools if away else ():
            whole = len(pool.heads) == self._hot.shape.kv_heads
            heads = np.array([None] if whole else list(pool.heads), object)
            for layer in pool.layers if pool.dense else ():
                self._log.events_of("kept", layer, heads.repeat(len(away)), np.tile(away, len(heads)))

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
            thinner = remaining < self._spans.host_lengths[span]
            for layer in np.flatnonzero(thinner.any(1)).tolist():
                heads = np.flatnonzero(thinner[layer])
                kinds = np.where(remaining[layer, heads] > 0, "thin", "evict").tolist()
                self._log.events_of(kinds, layer, heads, np.full(len(heads), span))

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
        score, cut = (None if t is None else t.float().cpu().numpy().copy() for t in (eviction.score, eviction.cut))
        self._log_thinner(units, alike, spans)
        make_rows = partial(bag_cuts, self._log.step, units, alike, spans, where, eviction.candidates, score, cut)
        self._log.cuts(make_rows)

    def _log_thinner(self, units: Sequence[tuple[int, int]], alike: bool, spans: np.ndarray) -> None:
        """Log the spans that lost a token: 'thin' with the first one, 'evict' with the last one. units: (layer, KV
        head) of each, one for all where they are `alike`; spans int64 [L, H_kv]."""
        layers, heads = np.array(units, np.int64).reshape(-1, 2).T
        span = spans[layers, heads]
        remaining, length = self._left[layers, heads, span], self._spans.host_lengths[span]
        changes = (span != WINDOW) & ((remaining == 0) | (remaining == length - 1))
        kinds = np.where(remaining == 0, "evict", "thin")
        for layer in np.unique(layers[changes]).tolist():
            units_here = changes & (layers == layer)
            head_numbers = np.full(int(units_here.sum()), None) if alike else heads[units_here]
            self._log.events_of(kinds[units_here].tolist(), None if alike else layer, head_numbers, span[units_here])

    def take(self, position: int) -> None:
        """Give the token at `position` its slot in every bag."""
        victims, self._victims = self._victims, None
        for pool in self._hot.pools:
            full = victims is not None and self._going[pool.index].any()
            pool.take_bag(victims[pool.index] if victims is not None and full else None, position, WINDOW)
