"""Recalls: the spans and tokens that a step's selection requests are fitted into the recall zones, before a step's
attention or beside it; the arrivals bring what is missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvlens.memory.arrivals import Arrivals, Missing
from kvlens.memory.log import DEPARTURE, MemoryLog, no_recalls
from kvlens.memory.placement import Selection
from kvlens.memory.zones import Plan, RecallZone, SharedZone, TokenPlan, TokenZone
from kvlens.tiers.cold import ColdTier
from kvlens.tiers.hot import HotTier
from kvlens.tiers.layout import Layout
from kvlens.tiers.slots import FREE, SharedSlots, SpanTable


def missing_units(plan: Plan, cold: ColdTier, layer: int) -> Missing:
    """Return the units that a layer's KV heads miss, in the plan's order."""
    heads, spans, firsts, counts = plan.missing
    return Missing(heads, spans, firsts, counts, plan.slots, cold.packed(layer, heads, spans))


def missing_tokens(plan: TokenPlan, spans: SpanTable) -> Missing:
    """Return the plan's tokens, those of one KV head and span as one unit."""
    owner = spans.owner[plan.positions]
    breaks = np.flatnonzero(np.diff(plan.heads) | np.diff(owner)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((begins, [len(owner)])))
    within = plan.positions - spans.host_starts[owner]
    raw = np.zeros(len(begins), dtype=bool)
    return Missing(plan.heads[begins], owner[begins], within[begins], counts, plan.slots, raw, within)


class Recaller:
    """Owns the recall zones and this step's counts.

    `counts`: of this step, as `no_recalls` names them.
    """

    def __init__(
        self,
        layout: Layout,
        hot: HotTier,
        shared: Sequence[SharedSlots],
        cold: ColdTier,
        spans: SpanTable,
        arrivals: Arrivals,
        log: MemoryLog,
    ) -> None:
        """shared: the slots that KV heads share; empty: none are."""
        assert layout.recall_spans is not None or not shared, "a layout with shared zones names the longest span"
        self.shape, self.layout, self.hot, self.cold, self.spans = hot.shape, layout, hot, cold, spans
        self._arrivals, self._log = arrivals, log
        self.zones: dict[int, RecallZone] = {}
        """of the layers that recall spans"""
        self.shared_slots = shared
        self.shared_zones = [
            SharedZone(layers, self.shape.kv_heads, spans.capacity, size)
            for layers, size in zip(layout.sharing(self.shape.layers), layout.shared, strict=True)
        ]
        self._token_bytes = hot.shape.head_token_bytes
        self.token_zones: dict[int, TokenZone] = {}
        """of the layers that recall single tokens"""
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
        self.counts = no_recalls(self.shape)
        self.refused: list[np.ndarray] = []
        """int64 [3, n] each: layer, KV head and span of what had no room in this step"""

    def recall(self, layer: int, selection: Selection, later: bool) -> None:
        """Move the requested spans of the KV heads that are due to the device, as far as they fit: before the
        attention, which waits for them, or `later`. A span in the cold tier stays there; the device's copy is given up
        without a transfer."""
        due = np.ones(self.shape.kv_heads, dtype=bool) if selection.now is None else selection.now.cpu().numpy()
        due = due != later
        cause, arrivals = selection.later_cause if later else selection.cause, self._arrivals
        phase = self._log.clock.enter("plan")
        if selection.rows is not None or selection.tokens is not None:
            zone = self._zone(layer) if selection.rows is None else self._token_zone(layer)
            arrivals.parts.watch(layer, zone)
        if due.any():
            if selection.rows is not None:
                missing = self._missing_tokens(layer, selection.rows, selection.positions, due, cause)
            else:
                missing = self._missing_spans(layer, selection, due, cause)
            if missing is not None:
                self._log.clock.enter("copy")
                arrivals.fetch(layer, missing, cause, blocking=not later)
        if not later or layer not in arrivals.under_way:
            arrivals.land(layer)
        self._log.clock.enter(phase)

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
        plan = self._zone(layer).plan(
            selection.requested.cpu().numpy(),
            self.spans.host_lengths,
            due,
            None if selection.tokens is None else selection.tokens.amax(1).cpu().numpy(),
            reuse=selection.reuse,
            equal_reuse=selection.equal_reuse,
        )
        assert not (selection.fits and plan.refused.size), "the method promised that its requests fit"
        ideal = plan.counts.pop("ideal_tokens") * self._token_bytes
        self._count(layer, plan.counts)
        if truncated:
            self.counts["ideal_bytes"][layer] = np.where(due, ideal, self.counts["ideal_bytes"][layer])
        self._give_up(layer, plan, cause)
        return missing_units(plan, self.cold, layer) if plan.slots.size else None

    def _missing_shared(self, layer: int, selection: Selection, due: np.ndarray, cause: str) -> Missing | None:
        """Fit the requested spans into the zone that the layer's KV heads share, count and log; return what has to
        come. What is under way lands first: its slots may be given to others."""
        assert selection.score is not None, "spans compete by the score that the method logs"
        assert selection.tokens is None, "a shared zone holds whole spans"
        assert due.all(), "KV heads that share a zone decide together"
        number = self.layout.shared_zone(layer)
        sharing = self.layout.sharing(self.shape.layers)[number]
        for sharing_layer in sharing:
            if sharing_layer in self._arrivals.under_way:
                self._arrivals.land(sharing_layer)
        requested, score = selection.requested.cpu().numpy(), selection.score.double().cpu().numpy()
        plan = self.shared_zones[number].plan(layer, requested, score, self.spans.host_lengths)
        plan.counts.pop("ideal_tokens")
        self._count(layer, plan.counts)
        slots = self.shared_slots[number]
        if plan.freed is not None:
            slots.role.masked_fill_(torch.from_numpy(plan.freed).to(slots.role.device), FREE)
        refused = np.stack((np.full(plan.refused.shape[1], layer), *plan.refused))
        for owner in np.unique(np.concatenate((plan.departed[0], refused[0]))).tolist():
            departed, over = (units[1:, units[0] == owner] for units in (plan.departed, refused))
            self.spans.mark(owner, departed, hot=False)
            self._log_departures(owner, departed, over, cause)
        return missing_units(plan, self.cold, layer) if plan.slots.size else None

    def _missing_tokens(
        self, layer: int, rows: torch.Tensor, read: torch.Tensor | None, due: np.ndarray, cause: str
    ) -> Missing | None:
        """Fit single tokens, positions int64 [H_kv, W], into the zone, count and log; return what has to come. read
        [H_kv, G, P] bool: tokens that are read; only these count as reused. None: all are."""
        kv_heads, capacity, slots = self.shape.kv_heads, self.spans.capacity, self.hot.slots(layer)
        plan = self._token_zone(layer).plan(rows.cpu().numpy(), np.flatnonzero(due))
        needed, moved = plan.held_after, np.stack((plan.heads, plan.positions))
        used = moved
        if read is not None:
            is_read = read.any(1).cpu().numpy()
            needed, used = (tokens[:, is_read[tuple(tokens)]] for tokens in (needed, moved))
        units_before, units_after, new_units, needed_units = np.zeros((4, kv_heads, capacity), bool)
        for units, (heads, positions) in (
            (units_before, plan.held_before),
            (units_after, plan.held_after),
            (new_units, moved),
            (needed_units, needed),
        ):
            units[heads, self.spans.owner[positions]] = True
        moved_count, needed_count, used_count = (
            np.bincount(heads, minlength=kv_heads) for heads, _ in (moved, needed, used)
        )
        counts = {"recalled_tokens": moved_count, "reused_tokens": needed_count - used_count}
        self._count(layer, {"n_recalled": new_units.sum(1), "n_reused": (needed_units & ~new_units).sum(1), **counts})
        freed = torch.from_numpy(plan.freed).to(slots.role.device)
        slots.role[freed[0], freed[1]] = FREE
        departed = np.stack((units_before & ~units_after).nonzero())
        self.spans.mark(layer, departed, hot=False)
        self._log.events_of(DEPARTURE.get(cause, "release"), layer, *departed)
        return missing_tokens(plan, self.spans) if len(plan.heads) else None

    def _zone(self, layer: int) -> RecallZone:
        if layer not in self.zones:
            slots = self._recall_slots(layer)
            self.zones[layer] = RecallZone(self.shape.kv_heads, self.spans.capacity, *slots, self.cold.page)
        return self.zones[layer]

    def _token_zone(self, layer: int) -> TokenZone:
        if layer not in self.token_zones:
            start, size = self.hot.pool(layer).start["recall"], self.layout.zones_of(layer).recall
            self.token_zones[layer] = TokenZone(start, size, self.shape.kv_heads)
        return self.token_zones[layer]

    def _count(self, layer: int, counts: dict[str, np.ndarray]) -> None:
        for name, count in counts.items():
            self.counts[name][layer] += count

    def _give_up(self, layer: int, plan: Plan, cause: str) -> None:
        if plan.freed is not None:
            zone, freed = self._zone(layer), torch.from_numpy(plan.freed)
            for pool in self.hot.parts[layer]:
                if pool.zones.recall:
                    role = pool.role[layer - pool.layers.start, :, zone.first_slot : zone.first_slot + zone.size]
                    role.masked_fill_(freed[pool.index[1]].to(role.device), FREE)
        if plan.departed.size:
            self.spans.mark(layer, plan.departed, hot=False)
        self._log_departures(layer, plan.departed, plan.refused, cause)

    def _log_departures(self, layer: int, departed: np.ndarray, refused: np.ndarray, cause: str) -> None:
        """Log the units int64 [2, n] that the device gave up and those that it refused."""
        if not refused.size:  # of a shared zone departed units come in any order
            by_head = departed[:, departed[0].argsort(kind="stable")]
            self._log.events_of(DEPARTURE.get(cause, "release"), layer, *by_head)
        else:
            units = np.concatenate((departed, refused), 1)
            order = units[0].argsort(kind="stable")  # of a KV head what is gone comes first
            kinds = [DEPARTURE.get(cause, "release")] * departed.shape[1] + ["refused"] * refused.shape[1]
            values = np.concatenate((np.full(departed.shape[1], np.nan), self.spans.host_lengths[refused[1]]))
            heads, spans = units[:, order]
            self._log.events_of([kinds[number] for number in order], layer, heads, spans, values[order])
        if refused.size:
            self.refused.append(np.stack((np.full(refused.shape[1], layer), *refused)))
