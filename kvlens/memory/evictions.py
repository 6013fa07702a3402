"""Carries out what stays on the device: kept tokens of the prompt and of blocks that leave the window, names of tokens
in their slots, and, in a bag, the eviction of single tokens. Tells what is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from kvlens.memory.hot_tier import FREE, ROLE, HotTier, Pool
from kvlens.memory.ledger import Tell
from kvlens.memory.placement import Eviction, Kept, Placement
from kvlens.memory.span_table import WINDOW, SpanTable
from kvlens.rows import CutRow


class Keeper:
    """Owns the log of cuts, and, for a bag, how many tokens each KV head has left of each span."""

    def __init__(self, hot: HotTier, spans: SpanTable, is_hot: torch.Tensor, tell: Tell) -> None:
        self.hot, self.spans, self.is_hot, self.tell = hot, spans, is_hot, tell
        self._cuts: list[CutRow] = []
        shape = hot.shape
        self._left = np.zeros((shape.layers, shape.kv_heads, spans.capacity), np.int64)
        self._victims: torch.Tensor | None = None
        """int64 [L, H_kv]: places of the bag that the next token takes, -1: one that was never used"""
        self._going = np.zeros((shape.layers, shape.kv_heads), bool)

    def drain_cuts(self) -> list[CutRow]:
        """Rows since the last call."""
        rows, self._cuts = self._cuts, []
        return rows

    # ----------------------------------------------------------------------------------------------------- placement
    def keep(
        self, pool: Pool, placement: Placement, keys: torch.Tensor, values: torch.Tensor, first: int, ids: list[int]
    ) -> None:
        """Write the kept tokens into the pool. keys, values [L, H_kv, m, D] of the positions from `first` on."""
        layers, heads = pool.at
        if pool.dense:
            end = placement.spans[-1].tok_end if placement.spans else first
            kept = torch.arange(first, end, device=keys.device)[None, None]
        else:
            kept = placement.kept.of(layers, heads)
        if kept.numel() == 0:
            return
        alike, size = kept.shape[:2] == (1, 1), (len(pool.layers), len(pool.heads), kept.shape[2])
        index = (kept - first)[0, 0] if alike else (kept - first).clamp(min=0).expand(size)

        def chosen(given: torch.Tensor) -> Iterator[torch.Tensor]:
            # one layer at a time: a method that keeps everything would need the whole prompt's keys once more
            for place, layer in enumerate(given):
                if alike:
                    yield layer.index_select(1, index)
                else:
                    yield layer.gather(1, index[place].unsqueeze(-1).expand(-1, -1, layer.shape[-1]))

        spans, role = self._names(placement, kept[0, 0] if alike else kept.expand(size), ids)
        position = kept[0, 0] if alike else kept.expand(size)
        pool.append(
            "kept" if pool.bag is None else "window",
            chosen(keys[pool.at]),
            chosen(values[pool.at]),
            position,
            spans,
            role,
        )
        pool.gaps |= bool((position < 0).any())
        if pool.dense:
            self.is_hot[pool.at][:, :, torch.tensor(ids, dtype=torch.long, device=keys.device)] = True
        if pool.bag is not None:
            counts = torch.zeros(*size[:2], self.spans.capacity, dtype=torch.long, device=keys.device)
            counts.scatter_add_(2, spans.expand(size), (role.expand(size) != FREE).long())
            self._left[pool.at] += counts.cpu().numpy()

    def rename(self, pool: Pool, placement: Placement, start: int, end: int, ids: list[int]) -> None:
        """Positions [start, end) stay in their slots under their new names."""
        positions = torch.arange(start, end, device=pool.role.device)
        slots = pool.window_slots(start, end)
        spans, role = self._names(placement, positions, ids)
        pool.span[:, :, slots] = spans.to(torch.int32)
        pool.role[:, :, slots] = role.to(torch.uint8)
        self.is_hot[pool.at][:, :, torch.tensor(ids, device=pool.role.device)] = True

    def tell_losses(self, placement: Placement, ids: list[int], step: int, end: int) -> None:
        """Log what the ranking dropped of the positions below `end`; of spans that are partial for some KV heads, which
        of these have nothing left (evict); and of these and cold ones, which keep all of them on the device (kept)."""
        kept = placement.kept
        if kept.score is not None or kept.newest:
            owner = torch.full((end,), -1, dtype=torch.long)
            for span, row in zip(ids, placement.spans, strict=True):
                owner[row.tok_start : row.tok_end] = span
            self._cuts += cuts(kept, owner, step)
        if placement.cold is not None:
            self._tell_thinned(placement, placement.cold, ids, step, end)
        layers, heads = kept.positions.shape[:2]
        if (layers, heads) == (1, 1) or not {"partial", "cold"} & set(placement.states):
            return
        spans, role = self._names(placement, kept.positions, ids)
        left = torch.zeros(layers, heads, self.spans.capacity, dtype=torch.long, device=spans.device)
        counts = left.scatter_add_(2, spans, (role != FREE).long()).tolist()
        given = [pair for pair in zip(ids, placement.states, strict=True) if pair[1] in ("partial", "cold")]
        for layer, head in np.ndindex(layers, heads):
            at = layer if layers > 1 else None, head if heads > 1 else None
            for span, state in given:
                if state == "partial" and counts[layer][head][span] == 0:
                    self.tell("evict", *at, span, None)
                elif counts[layer][head][span] == self.spans.tokens(span):
                    self.tell("kept", *at, span, None)

    def _tell_thinned(self, placement: Placement, cold: Kept, ids: list[int], step: int, end: int) -> None:
        """Log what of the offloaded spans did not go to the cold tier, and which KV heads have nothing there
        (evict)."""
        owner = torch.full((end,), -1, dtype=torch.long)
        for at in placement.offload:
            owner[placement.spans[at].tok_start : placement.spans[at].tok_end] = ids[at]
        self._cuts += cuts(cold, owner, step)
        mask = cold.mask(end).expand(self.hot.shape.layers, self.hot.shape.kv_heads, end).cpu()
        for at in placement.offload:
            left = mask[..., placement.spans[at].tok_start : placement.spans[at].tok_end].any(-1)
            for layer, head in (~left).nonzero().tolist():
                self.tell("evict", layer, head, ids[at], None)

    def tell_dense(self, placement: Placement, ids: list[int]) -> None:
        """Log that dense layers keep all of the spans that others give away."""
        given = [span for span, state in zip(ids, placement.states, strict=True) if state != "resident"]
        for pool in self.hot.pools if given else ():
            whole = len(pool.heads) == self.hot.shape.kv_heads
            for layer in pool.layers if pool.dense else ():
                for head in (None,) if whole else pool.heads:
                    for span in given:
                        self.tell("kept", layer, head, span, None)

    def _names(
        self, placement: Placement, positions: torch.Tensor, ids: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Span ids and role codes of positions, by the spans' ranges; FREE where there is no position."""
        device = positions.device
        starts = torch.tensor([span.tok_start for span in placement.spans], device=device)
        row = (torch.searchsorted(starts, positions.contiguous(), right=True) - 1).clamp(min=0)
        codes = torch.tensor([ROLE[role] for role in placement.roles], device=device)
        nothing = positions < 0
        return torch.tensor(ids, device=device)[row].masked_fill(nothing, 0), codes[row].masked_fill(nothing, FREE)

    # --------------------------------------------------------------------------------------------------------- a bag
    def name(self, ids: list[int], roles: list[str]) -> None:
        """Tokens of the bag that lie in the newest spans `ids` are theirs from now on, no longer the window's."""
        for span, role in zip(ids, roles, strict=True):
            row = self.spans.rows[span]
            for pool in self.hot.pools:
                mine = (pool.position >= row.tok_start) & (pool.position < row.tok_end) & (pool.span == WINDOW)
                pool.span.masked_fill_(mine, span)
                pool.role.masked_fill_(mine, ROLE[role])
                self._left[(*pool.at, span)] = mine.sum(-1).cpu().numpy()
            left = self._left[:, :, span]
            for layer, head in np.argwhere(left < self.spans.tokens(span)).tolist():
                self.tell("thin" if left[layer, head] else "evict", layer, head, span, None)

    def evict(self, eviction: Eviction, step: int) -> None:
        """What gives way to the next token: logged now, overwritten when it is fed."""
        places = self._victims = eviction.places
        position, span = torch.empty_like(places), torch.empty_like(places)
        for pool in self.hot.pools:
            at = (places[pool.at].clamp(min=0) + pool.start["window"])[..., None]
            position[pool.at] = pool.position.gather(2, at)[..., 0].long()
            span[pool.at] = pool.span.gather(2, at)[..., 0].long()
        where, spans, going = position.cpu().numpy(), span.cpu().numpy(), (places >= 0).cpu().numpy()
        self._going = going
        layers, heads = np.nonzero(going)
        self._left[layers, heads, spans[going]] -= 1
        alike = bool(going.all() and (where == where[0, 0]).all()) and eviction.score is None
        self._tell_gone(layers, heads, spans, alike)
        score, cut = ((None if t is None else t.float().cpu().numpy()) for t in (eviction.score, eviction.cut))
        one = np.ones(1, np.int32)
        for layer, head in [(0, 0)] if alike else zip(layers.tolist(), heads.tolist(), strict=True):
            row = CutRow(
                step,
                None if alike else int(layer),
                None if alike else int(head),
                eviction.candidates,
                max(eviction.candidates - 1, 0),
                float("nan") if cut is None else float(cut[layer, head]),
                spans[layer, head : head + 1].astype(np.int32),
                one,
                where[layer, head : head + 1].astype(np.int32),
                one * eviction.candidates,
                np.full(1, np.nan, np.float32) if score is None else score[layer, head : head + 1].astype(np.float32),
            )
            self._cuts.append(row)

    def _tell_gone(self, layers: np.ndarray, heads: np.ndarray, spans: np.ndarray, alike: bool) -> None:
        """Events of spans that lost a token: 'thin' with the first one, 'evict' with the last one."""
        for at, head in [(0, 0)] if alike else zip(layers.tolist(), heads.tolist(), strict=True):
            span = int(spans[at, head])
            left, whole = int(self._left[at, head, span]), self.spans.tokens(span)
            layer, kv_head = (None, None) if alike else (at, head)
            if span != WINDOW and left == 0:
                self.tell("evict", layer, kv_head, span, None)
            elif span != WINDOW and left == whole - 1:
                self.tell("thin", layer, kv_head, span, None)

    def take(self, position: int) -> None:
        """The token at `position` takes its slot in every bag."""
        victims, self._victims = self._victims, None
        for pool in self.hot.pools:
            full = victims is not None and self._going[pool.at].any()
            pool.take_bag(victims[pool.at] if victims is not None and full else None, position, WINDOW)


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
