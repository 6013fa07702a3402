"""Carries out a placement: spans get their ids, kept tokens and coarse entries their slots, and offloaded spans their
place in the cold tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kvlens.link.codec import Cut
from kvlens.link.host_link import Link
from kvlens.link.transfers import TransferLog
from kvlens.memory.arrivals import Arrivals
from kvlens.memory.counterfactual import Counterfactual
from kvlens.memory.evictions import Evictions
from kvlens.memory.log import MemoryLog, cuts, owners
from kvlens.memory.placement import Kept, Placement
from kvlens.memory.recall import Recaller
from kvlens.rows import SpanRow
from kvlens.tiers.cold import ColdTier
from kvlens.tiers.hot import HotTier, Pool
from kvlens.tiers.slots import FREE, ROLE, SpanTable


@dataclass(frozen=True)
class HostSide:
    """What serves spans in host memory: the link, the cold tier, and what brings units back to the device."""

    link: Link
    cold: ColdTier
    arrivals: Arrivals
    recaller: Recaller


class Allocator:
    """Writes the tiers' slots, rows and tables where a placement says so. Owns nothing."""

    def __init__(
        self,
        hot: HotTier,
        spans: SpanTable,
        evictions: Evictions | None,
        counterfactual: Counterfactual | None,
        transfers: TransferLog,
        log: MemoryLog,
    ) -> None:
        self._hot, self._spans, self._evictions = hot, spans, evictions
        self._counterfactual, self._transfers, self._log = counterfactual, transfers, log

    def open_spans(self, placement: Placement) -> list[int]:
        """Return the ids that the placement's spans get, and log them."""
        rows = [
            SpanRow(0, span.kind, span.tok_start, span.tok_end, self._log.step, span.reason, span.mean_surprisal, state)
            for span, state in zip(placement.spans, placement.states, strict=True)
        ]
        ids, device = self._spans.add(rows), self._spans.starts.device
        for span, row in zip(ids, rows, strict=True):
            self._log.event("span_open", span=span)
            if self._counterfactual is not None:
                self._counterfactual.name(self._hot, row.tok_start, row.tok_end, span)
        resident = [ids[i] for i in placement.selectable]
        selectable = [ids[i] for i in placement.offload] + resident
        self._spans.selectable[torch.tensor(selectable, dtype=torch.long, device=device)] = True
        self._spans.is_hot[:, :, torch.tensor(resident, dtype=torch.long, device=device)] = True
        for span, row in zip(ids, rows, strict=True):
            if row.state == "evicted":
                self._log.event("evict", span=span, value=float(row.tok_end - row.tok_start))
        return ids

    def keep(
        self, pool: Pool, placement: Placement, keys: torch.Tensor, values: torch.Tensor, start: int, ids: list[int]
    ) -> None:
        """Write the kept tokens into the pool. keys, values [L, H_kv, m, D] of the positions from `start` on."""
        if pool.dense:
            end = placement.spans[-1].tok_end if placement.spans else start
            retained = torch.arange(start, end, device=keys.device)[None, None]
        else:
            retained = placement.kept.select(*pool.index)
        if retained.numel() == 0:
            return
        alike, size = retained.shape[:2] == (1, 1), (len(pool.layers), len(pool.heads), retained.shape[2])
        position = retained[0, 0] if alike else retained.expand(size)
        index = position - start if alike else (retained - start).clamp(min=0).expand(size)

        def chosen(tokens: torch.Tensor) -> Iterator[torch.Tensor]:
            # one layer at a time: a method that keeps everything would need the whole prompt's keys once more
            for row, layer in enumerate(tokens):
                if alike:
                    yield layer.index_select(1, index)
                else:
                    yield layer.gather(1, index[row].unsqueeze(-1).expand(-1, -1, layer.shape[-1]))

        spans, role = placement.name_tokens(position, ids)
        zone = "kept" if pool.bag is None else "window"
        pool.append(zone, chosen(keys[pool.index]), chosen(values[pool.index]), position, spans, role)
        pool.gaps |= bool((position < 0).any())
        if pool.dense:
            self._spans.is_hot[pool.index][:, :, torch.tensor(ids, dtype=torch.long, device=keys.device)] = True
        if self._evictions is not None:
            self._evictions.count(pool, spans.expand(size), role.expand(size))

    def rename(self, pool: Pool, placement: Placement, start: int, end: int, ids: list[int]) -> None:
        """Give positions [start, end) of the window their new names in their slots."""
        positions = torch.arange(start, end, device=pool.role.device)
        slots = pool.window_slots(start, end)
        spans, role = placement.name_tokens(positions, ids)
        pool.span[:, :, slots] = spans.to(torch.int32)
        pool.role[:, :, slots] = role.to(torch.uint8)
        self._spans.is_hot[pool.index][:, :, torch.tensor(ids, device=pool.role.device)] = True

    def summarise(self, placement: Placement, ids: list[int]) -> None:
        """Write the coarse entries into their slots, if there are any."""
        if not placement.coarse:
            return
        assert placement.coarse_keys is not None
        assert placement.coarse_values is not None
        device = self._spans.starts.device
        named = torch.tensor(ids, device=device)
        begins = torch.tensor([span.tok_start for span in placement.spans], device=device)
        everywhere = torch.tensor(placement.coarse, device=device)
        counts, of_heads = placement.coarse_counts, placement.coarse_spans
        for pool in self._hot.pools:
            if not pool.dense and pool.zones.coarse:
                which = everywhere if of_heads is None else of_heads[pool.index]
                spans = named[which]
                role = torch.full_like(spans, ROLE["coarse"])
                if counts is not None and pool.weight is not None:
                    tokens, used = counts[pool.index], pool.used["coarse"]
                    role = torch.where(tokens > 0, ROLE["coarse"], FREE)
                    more = torch.where(tokens > 0, tokens, 1).log() - self._spans.log_lengths[spans]
                    pool.weight[:, :, used : used + spans.shape[-1]] = more
                keys, values = placement.coarse_keys[pool.index], placement.coarse_values[pool.index]
                pool.append("coarse", keys, values, begins[which], spans, role)

    def offload(
        self,
        placement: Placement,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        ids: list[int],
        cause: str,
        host: HostSide,
    ) -> None:
        """Move all spans that leave for the cold tier: one entry of the log, one move for each layer and form. keys,
        values [L, H_kv, m, D] from `start` on; cause: of the transfers."""
        codec, shape = placement.codec, self._hot.shape
        cold, layers = host.cold, host.cold.layers
        assert codec is not None
        cold.codec = codec
        if len(layers) < shape.layers:
            keys, values = keys[layers], values[layers]
        cuts = [Cut(ids[i], placement.spans[i].tok_start, placement.spans[i].tok_end) for i in placement.offload]
        stays = None
        if placement.cold is not None:
            mask = placement.cold.mask(start + keys.shape[2])[..., start:].expand(shape.layers, *keys.shape[1:3])
            stays = mask[layers].cpu().numpy()
        moves, stored = cold.put(cuts, codec.pack(keys, values, start, cuts), keys, values, start, stays)
        number, row, kv_head = stored.here.nonzero()
        layer, span = np.array(layers)[row], np.array([cut.span for cut in cuts])[number]
        entry = self._transfers.open(layer, kv_head, span, "d2h", cause, stored.size[stored.here], blocking=True)
        ticket = host.link.submit(entry, moves)
        self._log.log_stored(partial(stored.rows, entry))
        for cut in cuts:
            self._log.event("offload", span=cut.span, value=float(cut.end - cut.start))
        ticket.wait()

    # ---- what a placement loses, for the log
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
        spans, role = placement.name_tokens(retained.positions, ids)
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
