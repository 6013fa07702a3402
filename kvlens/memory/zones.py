"""The recall zones: which spans are there for each KV head, in which slots, and what has to go.

A zone belongs to a KV head, or several KV heads share it. In a shared zone the spans with the highest gates stay, until
the zone is full. Layers decide in turn: gates of layers that are still to come in a step are those of the step before.

Host bookkeeping only: it decides (kernels/zone_host.py says how), `Recaller` moves. Shapes: H_kv KV heads, S span ids,
W wishes, U units (a span of one KV head), M slots of a shared zone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlens.kernels.zone_host import HostPlan, HostTables, HostWishes, decide_on_host
from kvlens.tiers.slots import SpanTable


@dataclass(frozen=True)
class Plan:
    """What one recall of a layer does. Tokens; rows go by KV head, then by priority.

    missing int64 [4, n]: KV head, span, which of its tokens comes first, and how many of them have to come; slots int64
    [sum of these]: where they go; freed bool [H_kv, size]: the zone's slots whose content is given up, taken again or
    not, None: none; departed int64 [2, m]: KV head and span of which nothing is left, the least recently wanted first;
    refused int64 [2, r]: those that do not fit the zone beside the ones of higher priority. Of a shared zone freed is
    bool [M], its slots, and departed int64 [3, m], the layer first: spans of other layers may give way.
    """

    missing: np.ndarray
    slots: np.ndarray
    freed: np.ndarray | None
    departed: np.ndarray
    refused: np.ndarray
    counts: dict[str, np.ndarray]
    """int64 [H_kv]: n_recalled, n_reused (spans), recalled_tokens, reused_tokens, ideal_tokens: what had to come if
    all that is there were reused"""


class RecallZone:
    """Slots [first_slot, first_slot + size) of every KV head of one layer. Spans stay until their slots are needed, the
    least recently used go first. page: all spans are pages of so many tokens; 1: they have any length."""

    def __init__(self, kv_heads: int, spans: int, first_slot: int, size: int, page: int = 1) -> None:
        self.first_slot, self.size, self.page = first_slot, size // page * page, page
        self.tables = HostTables.empty(kv_heads, spans, size // page)
        self._stamped = 0
        """no span has a larger stamp"""

    def plan(
        self,
        requested: np.ndarray,
        lengths: np.ndarray,
        fire: np.ndarray,
        read: np.ndarray | None = None,
        *,
        reuse: bool = True,
        equal_reuse: bool = False,
    ) -> Plan:
        """Fit the wishes of the KV heads that `fire` bool [H_kv] into their zones, write that down and return it.
        requested int64 [H_kv, W], W > 0: span ids, highest priority first, no span twice, below 0: none; lengths int64
        [S]: tokens of spans; read int64 [H_kv, S]: how many leading tokens are wished for, None: all; reuse,
        equal_reuse: as kvlens.kernels.zone_tables.Wishes has them."""
        wishes = requested.shape[1]
        clock = -(-self._stamped // wishes)
        self._stamped = (clock + 1) * wishes
        named = np.maximum(requested, 0)
        tokens = lengths[named] if read is None else np.take_along_axis(read, named, 1)
        cells = tokens if self.page == 1 else tokens // self.page
        count = np.where((requested >= 0) & fire[:, None], cells, 0)
        plan = decide_on_host(self.tables, HostWishes(requested, count, fire, clock, reuse, equal_reuse))
        return self._plan(plan, requested, count)

    def tokens(self, spans: SpanTable) -> np.ndarray:
        """Return the tokens of each span in the zone, int64 [H_kv, S]."""
        return self.tables.held * self.page

    def _plan(self, plan: HostPlan, requested: np.ndarray, count: np.ndarray) -> Plan:
        page, missing, stay = self.page, plan.missing, plan.stay
        short, over = missing.nonzero(), ((count > 0) & ~plan.accepted).nonzero()
        slots, freed = self.first_slot + plan.cells * page, plan.freed
        if page > 1:
            slots = (slots[:, None] + np.arange(page)).ravel()
            freed = None if freed is None else freed.repeat(page, 1)
        granted, recalled, missing_cells, stay_cells, present = (
            cells.sum(1) for cells in (plan.accepted, missing > 0, missing, stay, plan.present)
        )
        counts = {
            "n_recalled": recalled,
            "n_reused": granted - recalled,
            "recalled_tokens": missing_cells * page,
            "reused_tokens": stay_cells * page,
            "ideal_tokens": (missing_cells + stay_cells - present) * page,
        }
        units = np.array((short[0], requested[short], stay[short] * page, missing[short] * page))
        return Plan(units, slots, freed, plan.departed, np.array((over[0], requested[over])), counts)


@dataclass(frozen=True)
class TokenPlan:
    """What one recall does for some KV heads of a layer. All int64.

    heads, positions, slots [n]: tokens that are to come, KV head after KV head, by ascending position; freed [2, m]: KV
    head and slot of what gives way; held_before, held_after [2, .]: KV head and position of what they held and hold.
    """

    heads: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    freed: np.ndarray
    held_before: np.ndarray
    held_after: np.ndarray


class TokenZone:
    """Slots [first_slot, first_slot + size) of every KV head of a layer."""

    def __init__(self, first_slot: int, size: int, kv_heads: int) -> None:
        self.first_slot = first_slot
        self.position = np.full((kv_heads, size), -1, np.int64)
        """[H_kv, size]: what lies where, -1: nothing"""

    def plan(self, requested: np.ndarray, heads: np.ndarray) -> TokenPlan:
        """Bring the zones of `heads` int64 [n] to hold requested int64 [H_kv, W], -1: nothing. Applies the plan to this
        bookkeeping and returns it. Raises AssertionError where there is too little room."""
        held_before, here, requests = self._held(heads), self.position[heads], requested[heads]
        rows = np.arange(len(heads))[:, None]
        # column p + 1: position p is requested; column 0 takes what names no position
        missing = np.zeros((len(heads), int(max(here.max(initial=-1), requests.max(initial=-1))) + 2), bool)
        missing[rows, requests + 1] = True
        missing[:, 0] = False
        most = int(missing.sum(1).max(initial=0))
        assert most <= here.shape[1], f"{most} tokens are requested, there is room for {here.shape[1]}"
        evicted = (here >= 0) & ~missing[rows, here + 1]
        missing[rows, here + 1] = False
        here[evicted] = -1
        free = here < 0
        fill = free & (free.cumsum(1) <= missing.sum(1)[:, None])
        row, columns = missing.nonzero()
        here[fill] = columns - 1
        self.position[heads] = here
        freed_rows, freed_slots = evicted.nonzero()
        slots = self.first_slot + fill.nonzero()[1]
        freed = np.stack((heads[freed_rows], self.first_slot + freed_slots))
        return TokenPlan(heads[row], columns - 1, slots, freed, held_before, self._held(heads))

    def tokens(self, spans: SpanTable) -> np.ndarray:
        """Return the tokens of each span in the zones, int64 [H_kv, S]."""
        shape = len(self.position), spans.capacity
        heads, positions = self._held(np.arange(shape[0]))
        units = heads * shape[1] + spans.owner[positions]
        return np.bincount(units, minlength=shape[0] * shape[1]).reshape(shape)

    def _held(self, heads: np.ndarray) -> np.ndarray:
        row, slot = np.nonzero(self.position[heads] >= 0)
        return np.stack((heads[row], self.position[heads[row], slot]))


class SharedZone:
    """Owns which units the zone holds, and what each layer asked for last. Spans are whole: all tokens or none."""

    def __init__(self, layers: range, kv_heads: int, spans: int, size: int) -> None:
        """layers: whose KV heads share the zone; size: slots."""
        self._first, self._kv_heads, self._spans = layers.start, kv_heads, spans
        self.tables = HostTables.empty(1, len(layers) * kv_heads * spans, size)
        self._granted = np.empty(0, np.int64), np.empty(0)
        """the units that every layer asked for when it decided last and still has, layer after layer, and their
        gates"""
        self._stamped = 0
        """no unit has a larger stamp"""

    def plan(self, layer: int, requested: np.ndarray, score: np.ndarray, lengths: np.ndarray) -> Plan:
        """Fit what a layer requests beside what the other layers asked for last, the highest gates first, write that
        down and return it. requested int64 [H_kv, W] span ids, -1: none; score [H_kv, S]: gates before their sigmoid;
        lengths int64 [S]: tokens of spans."""
        heads, columns = (requested >= 0).nonzero()
        spans = requested[heads, columns]
        codes = (layer - self._first) * self._kv_heads + heads
        request = codes * self._spans + spans, score[heads, spans].astype(np.float64)
        assert not np.isnan(request[1]).any(), "a span without a gate was requested"
        foreign_units = self._layers(self._granted[0]) != layer
        units, gates = (
            np.concatenate((own_column, held[foreign_units]))
            for own_column, held in zip(request, self._granted, strict=True)
        )
        order = (-gates).argsort(kind="stable")
        return self._decided(layer, units[order], order < len(spans), gates[order], lengths)

    def _decided(
        self, layer: int, wished: np.ndarray, is_own: np.ndarray, gates: np.ndarray, lengths: np.ndarray
    ) -> Plan:
        """Units [U] in decreasing order of their gates, and which of them are the layer's own."""
        clock = -(-self._stamped // max(1, len(wished)))
        self._stamped = (clock + 1) * len(wished)
        count = lengths[wished % self._spans]
        planned = decide_on_host(self.tables, HostWishes(wished[None], count[None], np.ones(1, bool), clock))
        accepted, missing, stay = planned.accepted[0], planned.missing[0], planned.stay[0]
        assert not (missing[~is_own] > 0).any(), "another layer's span is here whole, or not wished for"
        units, gates = wished[accepted], gates[accepted]
        by_layer = self._layers(units).argsort(kind="stable")
        self._granted = units[by_layer], gates[by_layer]
        short, over = missing.nonzero()[0], ((count > 0) & ~accepted & is_own).nonzero()[0]
        _, short_heads, short_spans = self._parts(wished[short])
        _, over_heads, over_spans = self._parts(wished[over])
        return Plan(
            np.array((short_heads, short_spans, stay[short], missing[short])),
            planned.cells,
            None if planned.freed is None else planned.freed[0],
            np.array(self._parts(planned.departed[1])),
            np.array((over_heads, over_spans)),
            self._counts(wished, accepted & is_own, count, missing),
        )

    def _layers(self, units: np.ndarray) -> np.ndarray:
        return units // (self._kv_heads * self._spans) + self._first

    def _counts(
        self, wished: np.ndarray, granted: np.ndarray, count: np.ndarray, missing: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the counts of Plan for the layer's granted units."""
        heads = self._parts(wished[granted])[1]
        tokens, brought = count[granted], missing[granted]
        figures = {
            "n_recalled": brought > 0,
            "n_reused": brought == 0,
            "recalled_tokens": brought,
            "reused_tokens": tokens - brought,
            "ideal_tokens": brought,
        }
        return {name: np.bincount(heads, values, self._kv_heads).astype(np.int64) for name, values in figures.items()}

    def _parts(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return layer, KV head and span of units."""
        codes, spans = np.divmod(units, self._spans)
        layers, heads = np.divmod(codes, self._kv_heads)
        return layers + self._first, heads, spans
