"""Brings spans from the cold tier into the recall zones, before a step's attention or behind its back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvlens.memory.cold import Codec, ColdTier, RawCodec, Unit
from kvlens.memory.hot import FREE, ROLE, HotTier
from kvlens.memory.layout import Layout
from kvlens.memory.ledger import Entry, Ledger
from kvlens.memory.link import Buffer, Link, Ticket
from kvlens.memory.move import Move
from kvlens.memory.placement import Selection
from kvlens.memory.recall import Fetch, Plan, RecallZone, Wish
from kvlens.memory.spantable import SpanTable
from kvlens.shape import KVShape

ARRIVAL = {"zoom": "zoom_in", "prefetch": "prefetch", "correction": "correction"}
"""Event that tells of a span's arrival, by the cause of its transfer; 'recall' for the others."""
DEPARTURE = {"zoom": "zoom_out"}
"""Event that tells that the device gave a span up; 'release' for the others."""

Tell = Callable[[str, int | None, int | None, int | None, float | None], None]
"""kind, layer, KV head, span, value"""


@dataclass
class _Arrival:
    kv_head: int
    fetch: Fetch
    unit: Unit
    slots: torch.Tensor
    ticket: Ticket


class Recaller:
    """Owns the zones' bookkeeping, the staging buffers, the copies under way and what this step's recalls came to.

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
        tell: Tell,
    ) -> None:
        self.shape, self.layout, self.hot, self.cold, self.spans = shape, layout, hot, cold, spans
        self.is_hot, self.ledger, self.link, self.tell = is_hot, ledger, link, tell
        self.codec: Codec = RawCodec()
        keys = hot.pools[0].keys
        size = layout.staging_bytes // keys.dtype.itemsize
        self.buffers = [
            Buffer(torch.zeros(size, dtype=keys.dtype, device=keys.device)) for _ in range(layout.staging_buffers)
        ]
        self._turn = 0
        self.zones = [
            [RecallZone(hot.pool(layer).start["recall"], layout.of(layer).recall) for _ in range(shape.kv_heads)]
            for layer in range(shape.layers)
        ]
        self._under_way: list[list[_Arrival]] = [[] for _ in range(shape.layers)]
        self.start_step()

    def start_step(self) -> None:
        """This step's counts begin anew."""
        size = (self.shape.layers, self.shape.kv_heads)
        self.counts = {name: np.zeros(size) for name in ("n_recalled", "n_reused", "recalled_tokens", "reused_tokens")}
        self.counts["ideal_bytes"] = np.full(size, np.nan)

    def recall(self, layer: int, selection: Selection, later: bool) -> None:
        """Start moving the wishes of the KV heads that are due now (or later), as far as they fit. A span in the cold
        tier stays there; the device's copy is given up without a transfer."""
        due = [True] * self.shape.kv_heads if selection.now is None else selection.now.tolist()
        heads = [head for head, now in enumerate(due) if now != later]
        if not heads:
            return
        cause = selection.later_cause if later else selection.cause
        wishes = self._wishes(selection, heads)
        least = None
        if truncated := selection.equal_reuse or not selection.reuse:
            reusable = {head: self.zones[layer][head].reusable(wishes[head]) for head in heads}
            least = min(reusable.values()) if selection.reuse else 0
        for head in heads:
            plan = self.zones[layer][head].plan(wishes[head], least)
            assert not (selection.fits and plan.refused), "the method said that its wishes fit"
            self._count(layer, head, plan)
            if truncated:
                missing = plan.fetched - (reusable[head] - plan.reused)
                self.counts["ideal_bytes"][layer, head] = missing * self.shape.head_token_bytes
            self._give_up(layer, head, plan, cause)
            for fetch in plan.misses:
                self._fetch(layer, head, fetch, cause, blocking=not later)

    def _wishes(self, selection: Selection, heads: list[int]) -> dict[int, list[Wish]]:
        want = selection.want.tolist()
        if selection.tokens is None:
            return {head: [(s, self.spans.tokens(s)) for s in want[head] if s >= 0] for head in heads}
        counts = selection.tokens.amax(1).gather(1, selection.want.clamp(min=0)).tolist()
        return {
            head: [(s, c) for s, c in zip(want[head], counts[head], strict=True) if s >= 0 and c > 0] for head in heads
        }

    def _count(self, layer: int, head: int, plan: Plan) -> None:
        counts = self.counts
        counts["n_recalled"][layer, head] += len(plan.misses)
        counts["n_reused"][layer, head] += len(plan.hits)
        counts["recalled_tokens"][layer, head] += plan.fetched
        counts["reused_tokens"][layer, head] += plan.reused

    def _give_up(self, layer: int, head: int, plan: Plan, cause: str) -> None:
        role = self.hot.slots(layer).role[head]
        for _, slots in plan.given_up:
            role.index_fill_(0, torch.tensor(slots, device=role.device), FREE)
        for span in plan.gone:
            self.is_hot[layer, head, span] = False
            self.tell(DEPARTURE.get(cause, "release"), layer, head, span, None)
        for span in plan.refused:
            self.tell("refused", layer, head, span, float(self.spans.tokens(span)))

    def _fetch(self, layer: int, head: int, fetch: Fetch, cause: str, blocking: bool) -> None:
        unit = self.cold.get(layer, fetch.span, head)
        slots = self.hot.slots(layer)
        index = torch.tensor(fetch.slots, device=slots.role.device)
        keys, values = slots.keys[head], slots.values[head]
        whole = fetch.first == 0 and len(fetch.slots) == unit.tokens
        assert whole or unit.form == "raw", "part of a span can be fetched only where it lies raw"
        source = unit.payload if whole else unit.part(fetch.first, len(fetch.slots))
        size = source.numel() * source.element_size()
        entry = self.ledger.open(layer, head, fetch.span, "h2d", cause, size, blocking)
        if unit.form == "raw" and not self.layout.streamed:
            ticket = self.link.submit(
                entry, [Move(keys, source[0], index, fetch.slots), Move(values, source[1], index, fetch.slots)]
            )
        else:
            ticket = self._through_staging(entry, unit, source, keys, values, index)
        self._under_way[layer].append(_Arrival(head, fetch, unit, index, ticket))

    def _through_staging(
        self,
        entry: Entry,
        unit: Unit,
        source: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        index: torch.Tensor,
    ) -> Ticket:
        buffer = self.buffers[self._turn % len(self.buffers)]
        self._turn += 1
        staged = buffer.tensor[: source.numel()].view(source.shape)
        codec = self.codec if unit.form != "raw" else RawCodec()

        def spread() -> None:
            span_keys, span_values = codec.unpack(unit, staged)
            keys.index_copy_(0, index, span_keys)
            values.index_copy_(0, index, span_values)

        return self.link.submit(entry, [Move(staged, source)], spread, buffer if self.layout.streamed else None)

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and make what they brought attendable."""
        self._wait(layer)
        slots = self.hot.slots(layer)
        for arrival in self._under_way[layer]:
            head, fetch = arrival.kv_head, arrival.fetch
            first = self.spans.rows[fetch.span].tok_start + fetch.first
            positions = torch.arange(first, first + len(fetch.slots), dtype=torch.int32, device=slots.position.device)
            slots.position[head].index_copy_(0, arrival.slots, positions)
            slots.span[head].index_fill_(0, arrival.slots, fetch.span)
            slots.role[head].index_fill_(
                0, arrival.slots, ROLE["resident" if arrival.unit.form == "raw" else "reconstructed"]
            )
            self.is_hot[layer, head, fetch.span] = True
            entry = arrival.ticket.entry
            self.tell(ARRIVAL.get(entry.cause, "recall"), layer, head, fetch.span, float(entry.bytes))
        self._under_way[layer].clear()

    def settle(self) -> None:
        """Wait until every copy under way has ended, without making it attendable: the run is over."""
        for layer in range(self.shape.layers):
            self._wait(layer)

    def _wait(self, layer: int) -> None:
        """The link works in order, so the last copy is waited for first, and carries the waiting time."""
        for arrival in reversed(self._under_way[layer]):
            arrival.ticket.wait()
