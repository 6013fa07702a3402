"""Brings spans from the cold tier into the recall zones, before a step's attention or behind its back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvlens.memory.codec import Codec, RawCodec
from kvlens.memory.cold_tier import ColdTier
from kvlens.memory.hot_tier import FREE, ROLE, HotTier, Pool
from kvlens.memory.layout import Layout
from kvlens.memory.ledger import EventLog, Ledger
from kvlens.memory.link import Buffer, Link, Ticket
from kvlens.memory.placement import Selection
from kvlens.memory.recall_batch import Between, Fetches, Recalled, Stage
from kvlens.memory.recall_zone import Plan, RecallZone, TokenZone
from kvlens.memory.span_table import SpanTable
from kvlens.shape import KVShape

ARRIVAL = {"zoom": "zoom_in", "prefetch": "prefetch", "correction": "correction"}
"""Event that tells of a span's arrival, by the cause of its transfer; 'recall' for the others."""
DEPARTURE = {"zoom": "zoom_out"}
"""Event that tells that the device gave a span up; 'release' for the others."""


@dataclass
class _Arrival:
    fetches: Fetches
    pool: Pool
    ticket: Ticket


class Recaller:
    """Owns the zones' bookkeeping, the staging buffers, the copies under way and what this step's recalls came to. What
    the KV heads of a layer's part miss at once is one entry of the ledger and one job of the link.

    `counts`: per (layer, KV head) of this step: n_recalled, n_reused (spans), recalled_tokens, reused_tokens,
    ideal_bytes (NaN: no recall truncated its reuse).
    """

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        hot: HotTier,
        cold: ColdTier,
        spans: SpanTable,
        is_hot: torch.Tensor,
        ledger: Ledger,
        link: Link,
        events: EventLog,
    ) -> None:
        self.shape, self.layout, self.hot, self.cold, self.spans = shape, layout, hot, cold, spans
        self.is_hot, self.ledger, self.link, self.events = is_hot, ledger, link, events
        self.codec: Codec = RawCodec()
        keys = hot.pools[0].keys
        size = layout.staging_bytes // keys.dtype.itemsize
        self.buffers = [
            Buffer(torch.zeros(size, dtype=keys.dtype, device=keys.device)) for _ in range(layout.staging_buffers)
        ]
        self.stage = Stage(self.buffers, layout.streamed)
        self.zones = [
            RecallZone(shape.kv_heads, spans.capacity, *self._recall_slots(layer), cold.page)
            for layer in range(shape.layers)
        ]
        self._lengths = torch.from_numpy(spans.host_lengths)
        self.token_zones: dict[int, TokenZone] = {}
        """of the layers that recall single tokens"""
        self._under_way: list[list[_Arrival]] = [[] for _ in range(shape.layers)]
        self.start_step()

    def _recall_slots(self, layer: int) -> tuple[int, int]:
        """First slot and size of a layer's recall zone, the same for all KV heads that are not whole; 0 where all
        are."""
        pools = [pool for pool in self.hot.pools_of(layer) if (layer, pool.heads.start) not in self.layout.whole]
        found = {(pool.start["recall"], pool.zones.recall) for pool in pools}
        assert len(found) <= 1 or not any(size for _, size in found), f"layer {layer} has several recall zones"
        return found.pop() if found else (0, 0)

    def start_step(self) -> None:
        """This step's counts begin anew."""
        size = (self.shape.layers, self.shape.kv_heads)
        self.counts = {name: np.zeros(size) for name in ("n_recalled", "n_reused", "recalled_tokens", "reused_tokens")}
        self.counts["ideal_bytes"] = np.full(size, np.nan)

    def recall(self, layer: int, selection: Selection, later: bool) -> None:
        """Start moving the wishes of the KV heads that are due now (or later), as far as they fit. A span in the cold
        tier stays there; the device's copy is given up without a transfer."""
        if selection.rows is not None:
            self._recall_tokens(layer, selection, later)
            return
        kv_heads = self.shape.kv_heads
        fire = (torch.ones(kv_heads, dtype=torch.bool) if selection.now is None else selection.now.cpu()) != later
        if not fire.any():
            return
        truncated = selection.equal_reuse or not selection.reuse
        if truncated:
            self.counts["ideal_bytes"][layer, fire.numpy()] = 0.0
        if not selection.requested.shape[1]:
            return
        assert selection.tokens is None or self.cold.page == 1, "of a page all tokens are read"
        plan = self.zones[layer].plan(
            selection.requested.cpu(),
            self._lengths,
            fire,
            None if selection.tokens is None else selection.tokens.amax(1, keepdim=True).cpu(),
            fits=selection.fits,
            reuse=selection.reuse,
            equal_reuse=selection.equal_reuse,
        )
        assert not (selection.fits and plan.refused.size), "the method said that its wishes fit"
        for name, count in plan.counts.items():
            if name != "ideal_tokens":
                self.counts[name][layer] += count
        if truncated:
            ideal = plan.counts["ideal_tokens"] * self.shape.head_token_bytes
            self.counts["ideal_bytes"][layer] = np.where(fire.numpy(), ideal, self.counts["ideal_bytes"][layer])
        cause = selection.later_cause if later else selection.cause
        self._give_up(layer, plan, cause)
        if plan.slots.size:
            self._fetch(layer, Fetches.of(plan, self.cold, layer), cause, blocking=not later)

    def _give_up(self, layer: int, plan: Plan, cause: str) -> None:
        if plan.freed.any():
            zone = self.zones[layer]
            for pool in self.hot.pools_of(layer):
                if pool.zones.recall:
                    role = pool.slots(layer).role[:, zone.first : zone.first + zone.size]
                    role.masked_fill_(plan.freed[pool.at[1]].to(role.device), FREE)
        gone, refused = plan.gone, plan.refused
        if gone.size:
            heads, spans = torch.from_numpy(gone).to(self.is_hot.device)
            self.is_hot[layer][heads, spans] = False
        if gone.size or refused.size:
            told = np.concatenate((gone, refused), 1)
            order = told[0].argsort(kind="stable")  # of a KV head what is gone comes first
            kinds = [DEPARTURE.get(cause, "release")] * gone.shape[1] + ["refused"] * refused.shape[1]
            values = np.concatenate((np.full(gone.shape[1], np.nan), self.spans.token_counts(refused[1])))
            heads, spans = told[:, order]
            self.events.tell_units([kinds[at] for at in order], layer, heads, spans, values[order])

    def _fetch(self, layer: int, fetches: Fetches, cause: str, blocking: bool) -> None:
        for pool in self.hot.pools_of(layer):
            mine = np.isin(fetches.kv_heads, pool.heads)
            if mine.any():
                self._fetch_into(pool, layer, fetches if mine.all() else fetches.where(mine), cause, blocking)

    def _fetch_into(self, pool: Pool, layer: int, fetches: Fetches, cause: str, blocking: bool) -> None:
        whole = self.spans.token_counts(fetches.spans) == fetches.counts
        assert (whole | ~fetches.packed).all(), "part of a span can be fetched only where it lies raw"
        sizes = fetches.counts * self.shape.head_token_bytes
        if fetches.packed.any():
            held = self.cold.size[self.cold.at(layer), fetches.kv_heads, fetches.spans]
            sizes = np.where(fetches.packed, held, sizes)
        entry = self.ledger.open(layer, fetches.kv_heads, fetches.spans, "h2d", cause, sizes, blocking)
        ticket = self.link.bring(entry, Recalled(layer, fetches, self._between(pool, layer)))
        self._under_way[layer].append(_Arrival(fetches, pool, ticket))

    def _between(self, pool: Pool, layer: int) -> Between:
        """The two sides of the recalls of a layer's part."""
        slots, lengths, first = pool.slots(layer), self.layout.recall_spans, pool.heads.start
        longest = pool.zones.recall if lengths is None else lengths[1]
        return Between(self.cold, self.codec, self.spans, self.stage, longest, slots.keys, slots.values, first)

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and make what they brought attendable."""
        if not self._under_way[layer]:
            return
        self._wait(layer)
        for arrival in self._under_way[layer]:
            fetches, entry = arrival.fetches, arrival.ticket.entry
            slots, first = arrival.pool.slots(layer), arrival.pool.heads.start
            positions = fetches.each(self.spans.first_positions(fetches.spans)) + fetches.offsets()
            roles = np.where(fetches.packed, ROLE["reconstructed"], ROLE["resident"])
            named = np.stack(
                (
                    fetches.each(fetches.kv_heads) - first,
                    fetches.slots,
                    positions,
                    *map(fetches.each, (fetches.spans, roles)),
                )
            )
            heads, at, position, span, role = torch.from_numpy(named).to(slots.role.device)
            slots.position[heads, at] = position.to(torch.int32)
            slots.span[heads, at] = span.to(torch.int32)
            slots.role[heads, at] = role.to(torch.uint8)
            units = torch.from_numpy(np.stack((fetches.kv_heads, fetches.spans))).to(slots.role.device)
            self.is_hot[layer][units[0], units[1]] = True
            kind, sizes = ARRIVAL.get(entry.cause, "recall"), entry.sizes.astype(np.float64)
            self.events.tell_units(kind, layer, entry.kv_heads, entry.spans, sizes)
        self._under_way[layer].clear()

    def _recall_tokens(self, layer: int, selection: Selection, later: bool) -> None:
        """Bring the zones of the KV heads that are due to hold the single tokens of `selection.rows`."""
        kv_heads, capacity, slots = self.shape.kv_heads, self.spans.capacity, self.hot.slots(layer)
        due = np.ones(kv_heads, dtype=bool) if selection.now is None else selection.now.cpu().numpy()
        heads = np.flatnonzero(due != later)
        if not len(heads):
            return
        if layer not in self.token_zones:
            first, size = self.hot.pool(layer).start["recall"], self.layout.of(layer).recall
            self.token_zones[layer] = TokenZone(first, size, kv_heads)
        assert selection.rows is not None
        plan = self.token_zones[layer].plan(selection.rows.cpu().numpy(), heads)
        before, after, came = (
            head * capacity + self.spans.owners(position)
            for head, position in (plan.before, plan.after, (plan.heads, plan.positions))
        )
        moved, held = (np.bincount(x, minlength=kv_heads) for x in (plan.heads, plan.after[0]))
        n_recalled, n_reused = (
            np.bincount(units // capacity, minlength=kv_heads) for units in (np.unique(came), np.setdiff1d(after, came))
        )
        told = {"n_recalled": n_recalled, "n_reused": n_reused, "recalled_tokens": moved, "reused_tokens": held - moved}
        for name, count in told.items():
            self.counts[name][layer] += count
        cause = selection.later_cause if later else selection.cause
        freed = torch.from_numpy(plan.freed).to(slots.role.device)
        slots.role[freed[0], freed[1]] = FREE
        gone = np.stack(np.divmod(np.setdiff1d(before, after), capacity))
        units = torch.from_numpy(gone).to(self.is_hot.device)
        self.is_hot[layer][units[0], units[1]] = False
        self.events.tell_units(DEPARTURE.get(cause, "release"), layer, gone[0], gone[1])
        if len(plan.heads):
            self._fetch(layer, Fetches.of_tokens(plan, self.spans), cause, blocking=not later)

    def settle(self) -> None:
        """Wait until every copy under way has ended, without making it attendable: the run is over."""
        for layer in range(self.shape.layers):
            self._wait(layer)

    def _wait(self, layer: int) -> None:
        """The link works in order, so the last copy is waited for first, and carries the waiting time."""
        for arrival in reversed(self._under_way[layer]):
            arrival.ticket.wait()
