"""The copies under way from host memory to the recall zones: begun for what a layer misses, awaited before its
attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlens.instruments import NoClock
from kvlens.link.host_link import Buffer, Link, Stage, Ticket
from kvlens.link.transfers import TransferLog
from kvlens.memory.batch import Missing, RecallBatch, Target
from kvlens.memory.cold_tier import ColdTier
from kvlens.memory.hot_tier import HotTier, Pool
from kvlens.memory.layout import Layout
from kvlens.memory.log import ARRIVAL, MemoryLog, RecalledParts
from kvlens.memory.slots import SharedSlots, SpanTable


@dataclass
class _Arrival:
    units: Missing
    pool: Pool | None
    """None: the units went to slots that KV heads share"""
    ticket: Ticket


class Arrivals:
    """Owns the staging buffers and the copies under way. All units that the KV heads of a layer's part miss at once are
    one entry of the transfer log and one job of the link."""

    def __init__(
        self,
        layout: Layout,
        hot: HotTier,
        shared: Sequence[SharedSlots],
        cold: ColdTier,
        spans: SpanTable,
        transfers: TransferLog,
        link: Link,
        log: MemoryLog,
    ) -> None:
        """shared: the slots that KV heads share; empty: none are."""
        self._layout, self._hot, self._shared, self._cold, self._spans = layout, hot, shared, cold, spans
        self._transfers, self._link, self._log = transfers, link, log
        keys = hot.example
        size = layout.staging_bytes // keys.dtype.itemsize
        self.buffers = [
            Buffer(torch.zeros(size, dtype=keys.dtype, device=keys.device)) for _ in range(layout.staging_buffers)
        ]
        self._stage = Stage(self.buffers, layout.streamed)
        self._token_bytes = hot.shape.head_token_bytes
        self.parts = RecalledParts(spans, hot.shape.kv_heads, log)
        self.under_way: dict[int, list[_Arrival]] = {}
        """of the layers whose attention has to wait for copies"""
        self.clock = NoClock()
        """times the phases of recalls"""

    def fetch(self, layer: int, missing: Missing, cause: str, blocking: bool) -> None:
        """Begin the copies, one for each part of the layer."""
        if self._shared:
            slots = self._shared[self._layout.shared_zone(layer)]
            self._fetch_into(None, Target(slots.keys[None], slots.values[None], None), layer, missing, cause, blocking)
            return
        for pool in self._hot.parts[layer]:
            in_pool = np.isin(missing.kv_heads, pool.heads)
            if in_pool.any():
                units = missing if in_pool.all() else missing.where(in_pool)
                self._fetch_into(pool, Target.of_pool(pool, layer), layer, units, cause, blocking)

    def _fetch_into(
        self, pool: Pool | None, target: Target, layer: int, units: Missing, cause: str, blocking: bool
    ) -> None:
        whole = self._spans.host_lengths[units.spans] == units.counts
        assert (whole | ~units.packed).all(), "part of a span can be recalled only where it is stored raw"
        sizes = units.counts * self._token_bytes
        if units.packed.any():
            stored = self._cold.size[self._cold.place[layer], units.kv_heads, units.spans]
            sizes = np.where(units.packed, stored, sizes)
        entry = self._transfers.open(layer, units.kv_heads, units.spans, "h2d", cause, sizes, blocking)
        limits = self._layout.recall_spans
        assert limits is not None or pool is not None, "a layout with shared zones names the longest span"
        longest = pool.zones.recall if limits is None and pool is not None else limits[1] if limits else 0
        batch = RecallBatch(layer, units, target, self._cold, self._spans, self._stage, longest)
        self.under_way.setdefault(layer, []).append(_Arrival(units, pool, self._link.bring(entry, batch)))

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and name the slots they filled, so that they can be attended."""
        if layer in self.under_way:
            phase = self.clock.enter("wait")
            self._wait(self.under_way[layer])
            self.clock.enter("copy")
            for arrival in self.under_way.pop(layer):
                self._name(layer, arrival)
            if phase != "copy":
                self.clock.enter(phase)
        if layer in self.parts.zones:
            self.parts.log(layer)

    def _name(self, layer: int, arrival: _Arrival) -> None:
        units, entry, pool = arrival.units, arrival.ticket.entry, arrival.pool
        first_head = 0 if pool is None else pool.heads.start
        named = torch.from_numpy(units.named(self._spans.host_starts, first_head)).to(self._spans.is_hot.device)
        slots = self._shared[self._layout.shared_zone(layer)] if pool is None else pool
        slots.name(layer, named)
        self._spans.mark(layer, np.stack((units.kv_heads, units.spans)), hot=True)
        kind, sizes = ARRIVAL.get(entry.cause, "recall"), entry.sizes.astype(np.float64)
        self._log.events_of(kind, layer, entry.kv_heads, entry.spans, sizes)
        if layer in self.parts.zones:
            self.parts.forget(layer, entry.kv_heads, entry.spans)

    def settle(self) -> None:
        """Wait until every copy under way has ended, without naming its slots: the run is over, and no step waits for
        these copies."""
        self._transfers.step += 1
        for arrivals in self.under_way.values():
            self._wait(arrivals)

    @staticmethod
    def _wait(arrivals: Sequence[_Arrival]) -> None:
        """Wait for the last copy first: the link works in order, so the last one carries the waiting time."""
        for arrival in reversed(arrivals):
            arrival.ticket.wait()
