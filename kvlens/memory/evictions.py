"""Evictions from a bag: single tokens that make room for the next one. Logs ranks, scores and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kvlens.instruments import CutRow
from kvlens.memory.log import MemoryLog
from kvlens.memory.placement import Eviction
from kvlens.tiers.hot import HotTier, Pool
from kvlens.tiers.slots import FREE, ROLE, WINDOW, SpanTable


class Evictions:
    """Owns how many tokens of each span each KV head has left in its bag, and which tokens give way next."""

    def __init__(self, hot: HotTier, spans: SpanTable, log: MemoryLog) -> None:
        self._hot, self._spans, self._log = hot, spans, log
        size = (hot.shape.layers, hot.shape.kv_heads)
        self._left = np.zeros((*size, spans.capacity), np.int64)
        self._victims: torch.Tensor | None = None
        """int64 [L, H_kv]: places of the bag that the next token takes, -1: one that was never used"""
        self._going = np.zeros(size, bool)

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


def bag_cuts(
    step: int,
    units: Sequence[tuple[int, int]],
    alike: bool,
    spans: np.ndarray,
    where: np.ndarray,
    candidates: int,
    score: np.ndarray | None,
    cut: np.ndarray | None,
) -> list[CutRow]:
    """One row per (layer, KV head) of `units`, of the token that gave way there; spans, where (positions), score and
    cut [L, H_kv]."""
    unit, nothing = np.ones(1, np.int32), np.full(1, np.nan, np.float32)
    return [
        CutRow(
            step,
            None if alike else layer,
            None if alike else head,
            candidates,
            max(candidates - 1, 0),
            float("nan") if cut is None else float(cut[layer, head]),
            spans[layer, head : head + 1].astype(np.int32),
            unit,
            where[layer, head : head + 1].astype(np.int32),
            unit * candidates,
            nothing if score is None else score[layer, head : head + 1].astype(np.float32),
        )
        for layer, head in units
    ]
