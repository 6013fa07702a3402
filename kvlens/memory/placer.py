"""Carries out where tokens go beside the kept ones: spans get their ids, coarse entries their slots, and what is
offloaded its place in the cold tier."""

from __future__ import annotations

import numpy as np
import torch

from kvlens.memory.codec import Cut
from kvlens.memory.cold_tier import Stored
from kvlens.memory.counterfactual import Held
from kvlens.memory.hot_tier import FREE, ROLE
from kvlens.memory.ledger import Entry, EventLog, Ledger
from kvlens.memory.link import Link
from kvlens.memory.placement import Placement
from kvlens.memory.recall import Recaller
from kvlens.rows import SpanHeadRow, SpanRow


class Placer:
    """Works on the tiers between which the recaller moves, and tells it the codec. Owns the list of what went to the
    cold tier since `drain`; writes selectable bool [S]."""

    def __init__(
        self, recaller: Recaller, ledger: Ledger, link: Link, events: EventLog, held: Held, selectable: torch.Tensor
    ) -> None:
        self.shape, self.device = recaller.shape, selectable.device
        self.hot, self.cold, self.spans, self.is_hot = recaller.hot, recaller.cold, recaller.spans, recaller.is_hot
        self.recaller, self.held, self.selectable = recaller, held, selectable
        self.ledger, self.link, self.events = ledger, link, events
        self._stored: list[tuple[Entry, Stored]] = []

    def open_spans(self, placement: Placement, step: int) -> list[int]:
        """Give the placement's spans their ids, and tell of them."""
        rows = [
            SpanRow(0, span.kind, span.tok_start, span.tok_end, step, span.reason, span.mean_surprisal, state)
            for span, state in zip(placement.spans, placement.states, strict=True)
        ]
        ids = self.spans.add(rows)
        for span, row in zip(ids, rows, strict=True):
            self.events.tell("span_open", span=span)
            self.held.name(self.hot, row.tok_start, row.tok_end, span)
        selectable = [ids[i] for i in (*placement.offload, *placement.selectable)]
        self.selectable[torch.tensor(selectable, dtype=torch.long, device=self.device)] = True
        kept = torch.tensor([ids[i] for i in placement.selectable], dtype=torch.long, device=self.device)
        self.is_hot[:, :, kept] = True
        for span, row in zip(ids, rows, strict=True):
            if row.state == "evicted":
                self.events.tell("evict", span=span, value=float(row.tok_end - row.tok_start))
        return ids

    def place(
        self, placement: Placement, keys: torch.Tensor, values: torch.Tensor, first: int, ids: list[int], cause: str
    ) -> None:
        """What goes beside the kept tokens: coarse entries, and spans to the cold tier. keys, values [L, H_kv, m, D]
        from `first` on."""
        if placement.coarse:
            assert placement.coarse_keys is not None
            assert placement.coarse_values is not None
            named = torch.tensor(ids, device=self.device)
            begins = torch.tensor([span.tok_start for span in placement.spans], device=self.device)
            which = torch.tensor(placement.coarse, device=self.device)
            counts, of_heads = placement.coarse_counts, placement.coarse_spans
            for pool in self.hot.pools:
                if not pool.dense and pool.zones.coarse:
                    mine_of = which if of_heads is None else of_heads[pool.at]
                    spans, starts = named[mine_of], begins[mine_of]
                    role = torch.full_like(spans, ROLE["coarse"])
                    if counts is not None and pool.weight is not None:
                        mine, at = counts[pool.at], pool.used["coarse"]
                        role = torch.where(mine > 0, ROLE["coarse"], FREE)
                        more = mine.clamp(min=1).log() - self.spans.log_lengths[spans]
                        pool.weight[:, :, at : at + spans.shape[-1]] = more
                    keys_of, values_of = placement.coarse_keys[pool.at], placement.coarse_values[pool.at]
                    pool.append("coarse", keys_of, values_of, starts, spans, role)
        if placement.offload:
            self._offload(placement, keys, values, first, ids, cause)

    def _offload(
        self, placement: Placement, keys: torch.Tensor, values: torch.Tensor, first: int, ids: list[int], cause: str
    ) -> None:
        """All spans that go to the cold tier: one entry of the ledger, one move for each layer and form."""
        codec, cold, layers = placement.codec, self.cold, self.cold.layers
        assert codec is not None
        self.recaller.codec = codec
        if len(layers) < self.shape.layers:
            keys, values = keys[layers], values[layers]
        cuts = [Cut(ids[i], placement.spans[i].tok_start, placement.spans[i].tok_end) for i in placement.offload]
        stays = None
        if placement.cold is not None:
            mask = placement.cold.mask(first + keys.shape[2])[..., first:].expand(self.shape.layers, *keys.shape[1:3])
            stays = mask[layers].cpu().numpy()
        moves, stored = cold.put(cuts, codec.pack(keys, values, first, cuts), keys, values, first, stays)
        at, row, kv_head = stored.here.nonzero()
        layer, span = np.array(layers)[row], np.array([cut.span for cut in cuts])[at]
        entry = self.ledger.open(layer, kv_head, span, "d2h", cause, stored.size[stored.here], blocking=True)
        ticket = self.link.submit(entry, moves)
        self._stored.append((entry, stored))
        for cut in cuts:
            self.events.tell("offload", span=cut.span, value=float(cut.end - cut.start))
        ticket.wait()

    def drain(self) -> list[SpanHeadRow]:
        """How what went to the cold tier since the last call lies there."""
        stored, self._stored = self._stored, []
        return [row for entry, one in stored for row in one.rows(entry)]

    def forget(self) -> None:
        """Nobody wants what the next `drain` would tell."""
        self._stored = []
