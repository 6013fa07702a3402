"""Brings spans from the cold tier into the recall zones, before a step's attention or behind its back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlens.memory.cold import Codec, ColdTier, RawCodec
from kvlens.memory.fetches import Between, Fetches, Recalled, Stage
from kvlens.memory.hot import FREE, ROLE, HotTier
from kvlens.memory.layout import Layout
from kvlens.memory.ledger import Ledger
from kvlens.memory.link import Buffer, Link, Ticket
from kvlens.memory.placement import Selection
from kvlens.memory.recall import Plan, RecallZone, Wish
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
    fetches: Fetches
    ticket: Ticket


class Recaller:
    """Owns the zones' bookkeeping, the staging buffers, the copies under way and what this step's recalls came to. What
    a layer's KV heads miss at once is one entry of the ledger and one job of the link.

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
        self.stage = Stage(self.buffers, layout.streamed)
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
        plans = []
        for head in heads:
            plan = self.zones[layer][head].plan(wishes[head], least)
            assert not (selection.fits and plan.refused), "the method said that its wishes fit"
            self._count(layer, head, plan)
            if truncated:
                missing = plan.fetched - (reusable[head] - plan.reused)
                self.counts["ideal_bytes"][layer, head] = missing * self.shape.head_token_bytes
            plans.append((head, plan))
        self._give_up(layer, plans, cause)
        if any(plan.misses for _, plan in plans):
            self._fetch(layer, Fetches.of(plans, self.cold, layer), cause, blocking=not later)

    def _wishes(self, selection: Selection, heads: list[int]) -> dict[int, list[Wish]]:
        requested = selection.requested.tolist()
        if selection.tokens is None:
            return {head: [(s, self.spans.tokens(s)) for s in requested[head] if s >= 0] for head in heads}
        counts = selection.tokens.amax(1).gather(1, selection.requested.clamp(min=0)).tolist()
        return {
            head: [(s, c) for s, c in zip(requested[head], counts[head], strict=True) if s >= 0 and c > 0]
            for head in heads
        }

    def _count(self, layer: int, head: int, plan: Plan) -> None:
        counts = self.counts
        counts["n_recalled"][layer, head] += len(plan.misses)
        counts["n_reused"][layer, head] += len(plan.hits)
        counts["recalled_tokens"][layer, head] += plan.fetched
        counts["reused_tokens"][layer, head] += plan.reused

    def _give_up(self, layer: int, plans: Sequence[tuple[int, Plan]], cause: str) -> None:
        role = self.hot.slots(layer).role
        free = [(head, slot) for head, plan in plans for _, slots in plan.given_up for slot in slots]
        if free:
            heads, slots = torch.tensor(free, device=role.device).T
            role[heads, slots] = FREE
        gone = [(head, span) for head, plan in plans for span in plan.gone]
        if gone:
            heads, spans = torch.tensor(gone, device=self.is_hot.device).T
            self.is_hot[layer][heads, spans] = False
        for head, plan in plans:
            for span in plan.gone:
                self.tell(DEPARTURE.get(cause, "release"), layer, head, span, None)
            for span in plan.refused:
                self.tell("refused", layer, head, span, float(self.spans.tokens(span)))

    def _fetch(self, layer: int, fetches: Fetches, cause: str, blocking: bool) -> None:
        whole = self.spans.token_counts(fetches.spans) == fetches.counts
        assert (whole | ~fetches.packed).all(), "part of a span can be fetched only where it lies raw"
        sizes = fetches.counts * self.shape.head_token_bytes
        if fetches.packed.any():
            held = self.cold.size[self.cold.at(layer), fetches.kv_heads, fetches.spans]
            sizes = np.where(fetches.packed, held, sizes)
        entry = self.ledger.open(layer, fetches.kv_heads, fetches.spans, "h2d", cause, sizes, blocking)
        ticket = self.link.bring(entry, Recalled(layer, fetches, self._between(layer)))
        self._under_way[layer].append(_Arrival(fetches, ticket))

    def _between(self, layer: int) -> Between:
        """The two sides of a layer's recalls."""
        slots, lengths = self.hot.slots(layer), self.layout.recall_spans
        longest = self.layout.of(layer).recall if lengths is None else lengths[1]
        return Between(self.cold, self.codec, self.spans, self.stage, longest, slots.keys, slots.values)

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and make what they brought attendable."""
        if not self._under_way[layer]:
            return  # nor need the layer's KV heads lie in one pool: where they do not, nothing is recalled
        self._wait(layer)
        slots = self.hot.slots(layer)
        for arrival in self._under_way[layer]:
            fetches, entry = arrival.fetches, arrival.ticket.entry
            positions = fetches.each(self.spans.first_positions(fetches.spans)) + fetches.offsets()
            roles = np.where(fetches.packed, ROLE["reconstructed"], ROLE["resident"])
            named = np.stack(
                (fetches.each(fetches.kv_heads), fetches.slots, positions, *map(fetches.each, (fetches.spans, roles)))
            )
            heads, at, position, span, role = torch.from_numpy(named).to(slots.role.device)
            slots.position[heads, at] = position.to(torch.int32)
            slots.span[heads, at] = span.to(torch.int32)
            slots.role[heads, at] = role.to(torch.uint8)
            units = torch.from_numpy(np.stack((fetches.kv_heads, fetches.spans))).to(slots.role.device)
            self.is_hot[layer][units[0], units[1]] = True
            for _, kv_head, moved, size in entry.lines():
                self.tell(ARRIVAL.get(entry.cause, "recall"), layer, kv_head, moved, float(size))
        self._under_way[layer].clear()

    def settle(self) -> None:
        """Wait until every copy under way has ended, without making it attendable: the run is over."""
        for layer in range(self.shape.layers):
            self._wait(layer)

    def _wait(self, layer: int) -> None:
        """The link works in order, so the last copy is waited for first, and carries the waiting time."""
        for arrival in reversed(self._under_way[layer]):
            arrival.ticket.wait()
