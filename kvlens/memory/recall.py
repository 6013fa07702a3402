"""Brings spans from the cold tier into the recall zones, before a step's attention or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlens.memory.clock import NoClock
from kvlens.memory.cold_tier import ColdTier
from kvlens.memory.hot_tier import FREE, HotTier, Pool
from kvlens.memory.layout import Layout
from kvlens.memory.ledger import Ledger, MemoryLog
from kvlens.memory.link import Buffer, Link, Ticket
from kvlens.memory.placement import Selection
from kvlens.memory.recall_batch import Missing, RecallBatch, Stage, Target
from kvlens.memory.recall_zone import Plan, RecallZone, TokenZone
from kvlens.memory.recalled_parts import RecalledParts
from kvlens.memory.shared_slots import SharedSlots
from kvlens.memory.shared_zone import SharedZone
from kvlens.memory.span_table import SpanTable

ARRIVAL = {"zoom": "zoom_in", "prefetch": "prefetch", "correction": "correction"}
"""Event that logs a span's arrival, by the cause of its transfer; 'recall' for the others."""
DEPARTURE = {"zoom": "zoom_out"}
"""Event that logs that the device gave a span up; 'release' for the others."""


@dataclass
class _Arrival:
    units: Missing
    pool: Pool | None
    """None: the units went to slots that KV heads share"""
    ticket: Ticket


class Recaller:
    """Owns the zones' bookkeeping, the staging buffers, the copies under way and this step's counts. All units that the
    KV heads of a layer's part miss at once are one entry of the ledger and one job of the link.

    `counts`: per (layer, KV head) of this step: n_recalled, n_reused (spans), recalled_tokens, reused_tokens,
    ideal_bytes (NaN: no recall truncated its reuse).
    """

    def __init__(
        self,
        layout: Layout,
        hot: HotTier,
        shared: Sequence[SharedSlots],
        cold: ColdTier,
        spans: SpanTable,
        ledger: Ledger,
        link: Link,
        log: MemoryLog,
    ) -> None:
        """shared: the slots that KV heads share; empty: none are."""
        self.shape, self.layout, self.hot, self.cold, self.spans = hot.shape, layout, hot, cold, spans
        self._ledger, self._link, self._log = ledger, link, log
        keys = hot.pools[0].keys
        size = layout.staging_bytes // keys.dtype.itemsize
        self.buffers = [
            Buffer(torch.zeros(size, dtype=keys.dtype, device=keys.device)) for _ in range(layout.staging_buffers)
        ]
        self._stage = Stage(self.buffers, layout.streamed)
        self.zones = [
            RecallZone(self.shape.kv_heads, spans.capacity, *self._recall_slots(layer), cold.page)
            for layer in range(self.shape.layers)
        ]
        self.shared_slots = shared
        self.shared_zones = [
            SharedZone(layers, self.shape.kv_heads, spans.capacity, size)
            for layers, size in zip(layout.sharing(self.shape.layers), layout.shared, strict=True)
        ]
        self._lengths = torch.from_numpy(spans.host_lengths)
        self.token_zones: dict[int, TokenZone] = {}
        """of the layers that recall single tokens"""
        self.under_way: dict[int, list[_Arrival]] = {}
        """of the layers whose attention has to wait for copies"""
        self._parts: RecalledParts | None = None
        """None: no layer has recalled tokens or parts of spans"""
        self._token_bytes = self.shape.head_token_bytes
        self.clock = NoClock()
        """times the phases of recalls"""
        self.start_step()

    def _recall_slots(self, layer: int) -> tuple[int, int]:
        """Return first slot and size of a layer's recall zone, the same for all KV heads that are not whole; 0 where
        all are."""
        pools = [pool for pool in self.hot.parts[layer] if (layer, pool.heads.start) not in self.layout.whole]
        zones = {(pool.start["recall"], pool.zones.recall) for pool in pools}
        assert len(zones) <= 1 or not any(size for _, size in zones), f"layer {layer} has several recall zones"
        return zones.pop() if zones else (0, 0)

    def start_step(self) -> None:
        """Begin this step's counts."""
        size = (self.shape.layers, self.shape.kv_heads)
        self.counts = {name: np.zeros(size) for name in ("n_recalled", "n_reused", "recalled_tokens", "reused_tokens")}
        self.counts["ideal_bytes"] = np.full(size, np.nan)
        self.refused: list[np.ndarray] = []
        """int64 [3, n] each: layer, KV head and span of what had no room in this step"""

    def recall(self, layer: int, selection: Selection, later: bool) -> None:
        """Move the requested spans of the KV heads that are due to the device, as far as they fit: before the
        attention, which waits for them, or `later`. A span in the cold tier stays there; the device's copy is given up
        without a transfer."""
        due = np.ones(self.shape.kv_heads, dtype=bool) if selection.now is None else selection.now.cpu().numpy()
        due = due != later
        cause, phase = selection.later_cause if later else selection.cause, self.clock.enter("plan")
        if selection.rows is not None or selection.tokens is not None:
            if self._parts is None:
                self._parts = RecalledParts(self.spans, self.shape.kv_heads, self._log)
            self._parts.watch(layer)
        if due.any():
            if selection.rows is not None:
                missing = self._missing_tokens(layer, selection.rows, due, cause)
            else:
                missing = self._missing_spans(layer, selection, due, cause)
            if missing is not None:
                self.clock.enter("copy")
                self._fetch(layer, missing, cause, blocking=not later)
        if not later:
            self.land(layer)
        elif layer not in self.under_way:
            self._log_parts(layer)
        self.clock.enter(phase)

    def _missing_spans(self, layer: int, selection: Selection, due: np.ndarray, cause: str) -> Missing | None:
        """Fit the requested spans into the zone, count and log; return what has to come."""
        truncated = selection.equal_reuse or not selection.reuse
        if truncated:
            self.counts["ideal_bytes"][layer, due] = 0.0
        if self.shared_zones:
            return self._missing_shared(layer, selection, due, cause)
        if not selection.requested.shape[1]:
            return None
        assert selection.tokens is None or self.cold.page == 1, "of a page all tokens are read"
        plan = self.zones[layer].plan(
            selection.requested.cpu(),
            self._lengths,
            torch.from_numpy(due),
            None if selection.tokens is None else selection.tokens.amax(1, keepdim=True).cpu(),
            fits=selection.fits,
            reuse=selection.reuse,
            equal_reuse=selection.equal_reuse,
        )
        assert not (selection.fits and plan.refused.size), "the method promised that its requests fit"
        ideal = plan.counts.pop("ideal_tokens") * self._token_bytes
        self._count(layer, plan.counts)
        if truncated:
            self.counts["ideal_bytes"][layer] = np.where(due, ideal, self.counts["ideal_bytes"][layer])
        self._give_up(layer, plan, cause)
        return Missing.by_span(plan, self.cold, layer) if plan.slots.size else None

    def _missing_shared(self, layer: int, selection: Selection, due: np.ndarray, cause: str) -> Missing | None:
        """Fit the requested spans into the zone that the layer's KV heads share, count and log; return what has to
        come. What is under way lands first: its slots may be given to others."""
        assert selection.score is not None, "spans compete by the score that the method logs"
        assert selection.tokens is None, "a shared zone holds whole spans"
        assert due.all(), "KV heads that share a zone decide together"
        number = self.layout.shared_zone(layer)
        for sharing in self.layout.sharing(self.shape.layers)[number]:
            self.land(sharing)
        plan = self.shared_zones[number].plan(layer, selection.requested.cpu(), selection.score.cpu(), self._lengths)
        plan.counts.pop("ideal_tokens")
        self._count(layer, plan.counts)
        slots = self.shared_slots[number]
        slots.role.masked_fill_(plan.freed.to(slots.role.device), FREE)
        refused = np.stack((np.full(plan.refused.shape[1], layer), *plan.refused))
        for owner in np.unique(np.concatenate((plan.departed[0], refused[0]))).tolist():
            departed, over = (units[1:, units[0] == owner] for units in (plan.departed, refused))
            self._mark(owner, departed, hot=False)
            self._log_departures(owner, departed, over, cause)
        return Missing.by_span(plan, self.cold, layer) if plan.slots.size else None

    def _missing_tokens(self, layer: int, rows: torch.Tensor, due: np.ndarray, cause: str) -> Missing | None:
        """Fit single tokens, positions int64 [H_kv, W], into the zone, count and log; return what has to come."""
        kv_heads, capacity, slots = self.shape.kv_heads, self.spans.capacity, self.hot.slots(layer)
        if layer not in self.token_zones:
            start, size = self.hot.pool(layer).start["recall"], self.layout.of(layer).recall
            self.token_zones[layer] = TokenZone(start, size, kv_heads)
        plan = self.token_zones[layer].plan(rows.cpu().numpy(), np.flatnonzero(due))
        units_before, units_after, came = (
            head * capacity + self.spans.owner[position]
            for head, position in (plan.before, plan.after, (plan.heads, plan.positions))
        )
        moved, held = (np.bincount(heads, minlength=kv_heads) for heads in (plan.heads, plan.after[0]))
        n_recalled, n_reused = (
            np.bincount(units // capacity, minlength=kv_heads)
            for units in (np.unique(came), np.setdiff1d(units_after, came))
        )
        counts = {"recalled_tokens": moved, "reused_tokens": held - moved}
        self._count(layer, {"n_recalled": n_recalled, "n_reused": n_reused, **counts})
        freed = torch.from_numpy(plan.freed).to(slots.role.device)
        slots.role[freed[0], freed[1]] = FREE
        departed = np.stack(np.divmod(np.setdiff1d(units_before, units_after), capacity))
        self._mark(layer, departed, hot=False)
        self._log.events_of(DEPARTURE.get(cause, "release"), layer, *departed)
        return Missing.by_token(plan, self.spans) if len(plan.heads) else None

    def _count(self, layer: int, counts: dict[str, np.ndarray]) -> None:
        for name, count in counts.items():
            self.counts[name][layer] += count

    def _mark(self, layer: int, units: np.ndarray, hot: bool) -> None:
        """Write whether units int64 [2, n] (KV heads, spans) of a layer have tokens in slots."""
        heads, spans = torch.from_numpy(units).to(self.spans.is_hot.device)
        self.spans.is_hot[layer][heads, spans] = hot

    def _give_up(self, layer: int, plan: Plan, cause: str) -> None:
        if plan.freed.any():
            zone = self.zones[layer]
            for pool in self.hot.parts[layer]:
                if pool.zones.recall:
                    role = pool.role[layer - pool.layers.start, :, zone.first : zone.first + zone.size]
                    role.masked_fill_(plan.freed[pool.index[1]].to(role.device), FREE)
        self._mark(layer, plan.gone, hot=False)
        self._log_departures(layer, plan.gone, plan.refused, cause)

    def _log_departures(self, layer: int, departed: np.ndarray, refused: np.ndarray, cause: str) -> None:
        """Log the units int64 [2, n] that the device gave up and those that it refused."""
        if departed.size or refused.size:
            units = np.concatenate((departed, refused), 1)
            order = units[0].argsort(kind="stable")  # of a KV head what is gone comes first
            kinds = [DEPARTURE.get(cause, "release")] * departed.shape[1] + ["refused"] * refused.shape[1]
            values = np.concatenate((np.full(departed.shape[1], np.nan), self.spans.host_lengths[refused[1]]))
            heads, spans = units[:, order]
            self._log.events_of([kinds[number] for number in order], layer, heads, spans, values[order])
        if refused.size:
            self.refused.append(np.stack((np.full(refused.shape[1], layer), *refused)))

    def _fetch(self, layer: int, missing: Missing, cause: str, blocking: bool) -> None:
        """Begin the copies, one for each part of the layer."""
        if self.shared_slots:
            slots = self.shared_slots[self.layout.shared_zone(layer)]
            self._fetch_into(None, Target(slots.keys[None], slots.values[None], None), layer, missing, cause, blocking)
            return
        for pool in self.hot.parts[layer]:
            in_pool = np.isin(missing.kv_heads, pool.heads)
            if in_pool.any():
                units = missing if in_pool.all() else missing.where(in_pool)
                self._fetch_into(pool, Target.of_pool(pool, layer), layer, units, cause, blocking)

    def _fetch_into(
        self, pool: Pool | None, target: Target, layer: int, units: Missing, cause: str, blocking: bool
    ) -> None:
        whole = self.spans.host_lengths[units.spans] == units.counts
        assert (whole | ~units.packed).all(), "part of a span can be recalled only where it is stored raw"
        sizes = units.counts * self._token_bytes
        if units.packed.any():
            stored = self.cold.size[self.cold.place[layer], units.kv_heads, units.spans]
            sizes = np.where(units.packed, stored, sizes)
        entry = self._ledger.open(layer, units.kv_heads, units.spans, "h2d", cause, sizes, blocking)
        limits = self.layout.recall_spans
        assert limits is not None or pool is not None, "a layout with shared zones names the longest span"
        longest = pool.zones.recall if limits is None and pool is not None else limits[1] if limits else 0
        batch = RecallBatch(layer, units, target, self.cold, self.spans, self._stage, longest)
        self.under_way.setdefault(layer, []).append(_Arrival(units, pool, self._link.bring(entry, batch)))

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and name the slots they filled, so that they can be attended."""
        phase = self.clock.enter("wait")
        self._wait(layer)
        self.clock.enter("copy")
        for arrival in self.under_way.pop(layer, ()):
            units, entry, pool = arrival.units, arrival.ticket.entry, arrival.pool
            first_head = 0 if pool is None else pool.heads.start
            named = torch.from_numpy(units.named(self.spans.host_starts, first_head)).to(self.spans.is_hot.device)
            if pool is None:
                self.shared_slots[self.layout.shared_zone(layer)].name(layer, named)
            else:
                slots = pool.slots(layer)
                heads, places, position, span, role = named
                slots.position[heads, places] = position.to(torch.int32)
                slots.span[heads, places] = span.to(torch.int32)
                slots.role[heads, places] = role.to(torch.uint8)
            self._mark(layer, np.stack((units.kv_heads, units.spans)), hot=True)
            kind, sizes = ARRIVAL.get(entry.cause, "recall"), entry.sizes.astype(np.float64)
            self._log.events_of(kind, layer, entry.kv_heads, entry.spans, sizes)
            if self._parts is not None:
                self._parts.forget(layer, entry.kv_heads, entry.spans)
        self._log_parts(layer)
        self.clock.enter(phase)

    def _log_parts(self, layer: int) -> None:
        if self._parts is not None:
            self._parts.log(layer, self.token_zones.get(layer, self.zones[layer]))

    def settle(self) -> None:
        """Wait until every copy under way has ended, without naming its slots: the run is over, and no step waits for
        these copies."""
        self._ledger.step += 1
        for layer in self.under_way:
            self._wait(layer)

    def _wait(self, layer: int) -> None:
        """Wait for the last copy first: the link works in order, so the last one carries the waiting time."""
        for arrival in reversed(self.under_way.get(layer, ())):
            arrival.ticket.wait()
