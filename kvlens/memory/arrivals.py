"""Units on their way from host memory to the recall zones: copies are begun for what the KV heads of a layer miss, and
awaited before its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvlens.link.codec import Units
from kvlens.link.copies import Move, Numbers, Tokens
from kvlens.link.host_link import Buffer, Link, Moving, Part, Stage, Ticket
from kvlens.link.transfers import TransferLog
from kvlens.memory.log import ARRIVAL, MemoryLog, RecalledParts
from kvlens.tiers.cold import ColdTier
from kvlens.tiers.hot import HotTier, Pool
from kvlens.tiers.layout import Layout
from kvlens.tiers.slots import ROLE, SharedSlots, SlotNames, SpanTable, Target


@dataclass(frozen=True)
class Missing:
    """Units of one layer that its slots miss. kv_heads, spans, counts (tokens), firsts (which of the span's tokens is
    the first) int64 [n]; slots int64 [sum of counts], unit after unit; packed bool [n]. within int64 [sum of counts]:
    which token of its span each token is; None: the tokens of a unit follow each other."""

    kv_heads: np.ndarray
    spans: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    slots: np.ndarray
    packed: np.ndarray
    within: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.spans)

    def each(self, of_units: np.ndarray) -> np.ndarray:
        """Return a value of each unit [n] for each of its tokens."""
        return np.repeat(of_units, self.counts)

    def offsets(self) -> np.ndarray:
        """Return which token of its span each token is."""
        if self.within is not None:
            return self.within
        ends = self.counts.cumsum()
        return np.arange(len(self.slots)) - np.repeat(ends - self.counts - self.firsts, self.counts)

    def names(self, starts: np.ndarray) -> SlotNames:
        """Return what the units' slots are called. starts int64 [S]: first position of each span."""
        unit = self.each(np.arange(len(self)))
        position = starts[self.spans][unit] + self.offsets()
        roles = np.where(self.packed, ROLE["reconstructed"], ROLE["resident"]).astype(np.uint8)[unit]
        spans = self.spans.astype(np.int32)[unit]
        return SlotNames(self.kv_heads[unit], self.slots, position.astype(np.int32), spans, roles)

    def where(self, mask: np.ndarray) -> Missing:
        """Return the units in `mask` bool [n]."""
        if mask.all():
            return self
        tokens = self.each(mask)
        within = None if self.within is None else self.within[tokens]
        heads, spans, firsts, counts = (x[mask] for x in (self.kv_heads, self.spans, self.firsts, self.counts))
        return Missing(heads, spans, firsts, counts, self.slots[tokens], self.packed[mask], within)


class RecallBatch:
    """Missing units as the link carries them (kvlens.link.host_link.Batch), into the target's slots. longest: tokens of
    a span that can be requested."""

    def __init__(
        self, layer: int, units: Missing, target: Target, cold: ColdTier, spans: SpanTable, stage: Stage, longest: int
    ) -> None:
        self._layer, self._units, self._target, self._longest = layer, units, target, longest
        self._cold, self._codec, self._spans, self._stage = cold, cold.codec, spans, stage
        self._keys, self._values = target.keys, target.values

    def whole(self) -> tuple[Sequence[Moving], Callable[[], None] | None]:
        if not self._units.packed.any():
            return [self._tokens(self._units)], None
        raw, packed = self._units.where(~self._units.packed), self._units.where(self._units.packed)
        moves: list[Moving] = [self._tokens(raw)] if len(raw) else []
        flat, units, sizes = self._packed(packed)
        numbers = torch.empty(int(sizes.sum()), dtype=flat.dtype)
        moves.append(Numbers(numbers, flat, units.table[:, 0].numpy().copy(), sizes))
        units.table[:, 0] = torch.from_numpy(sizes.cumsum() - sizes)

        def rebuild() -> None:
            keys, values = self._codec.unpack(numbers, units)
            live = torch.arange(units.tokens) < units.table[:, 1, None]
            self._write(self._where(packed), keys[live], values[live])

        return moves, rebuild

    def parts(self) -> Iterator[Part]:
        units, streamed = self._units, self._stage.streamed
        raw = units.where(~units.packed)
        if len(raw) and not streamed:
            yield Part(self._tokens(raw))
        for unit in range(len(units)):
            if streamed or units.packed[unit]:
                yield self._staged(units.where(np.arange(len(units)) == unit))

    def _tokens(self, units: Missing) -> Tokens:
        """Return the copy of raw tokens straight into their slots."""
        heads, pool = units.each(units.kv_heads), self._cold.layer(self._layer)
        rows = self._cold.keys_at(heads, units.each(self._spans.host_starts[units.spans]) + units.offsets())
        flat = pool.view(-1, pool.shape[-1])
        return Tokens(self._keys, self._values, flat, rows, self._cold.page, self._target.rows(heads), units.slots)

    def _staged(self, unit: Missing) -> Part:
        """Return the copy of one unit through a staging buffer. What its spreading needs is on the device before."""
        buffer, where = self._stage.next(), self._where(unit)
        head, span, first_token, tokens = (int(x[0]) for x in (unit.kv_heads, unit.spans, unit.firsts, unit.counts))
        stored = self._cold.unit(self._layer, span, head)
        source = stored if unit.packed[0] else stored[:, first_token : first_token + tokens]
        staged = buffer.tensor[: source.numel()].view(source.shape)
        spread = partial(self._write, where, staged[0], staged[1])
        if unit.packed[0]:
            _, units, _ = self._packed(unit)
            units.table[:, 0] = 0
            spread = partial(self._rebuild, where, staged, units.to(staged.device), tokens)
        return Part(Move(staged, source), spread, buffer if self._stage.streamed else None)

    def _packed(self, units: Missing) -> tuple[torch.Tensor, Units, np.ndarray]:
        """Return the layer's flat pool, the packed units as they are stored there, and their sizes in numbers."""
        cold, place = self._cold, self._cold.place[self._layer]
        heads, spans = torch.from_numpy(units.kv_heads), torch.from_numpy(units.spans)
        starts = torch.from_numpy(self._spans.host_starts[units.spans])
        packed = Units(cold.table[place, heads, spans], starts, self._layer, self._longest, self._keys.shape[-1], heads)
        sizes: np.ndarray = cold.size[place, units.kv_heads, units.spans] // cold.dtype.itemsize
        return cold.flat[place], packed, sizes

    def _rebuild(self, where: torch.Tensor, staged: torch.Tensor, units: Units, tokens: int) -> None:
        keys, values = self._codec.unpack(staged, units)
        self._write(where, keys[0, :tokens], values[0, :tokens])

    def _where(self, units: Missing) -> torch.Tensor:
        """Return int64 [2, tokens]: KV head of the part and slot of every token."""
        head_slots = np.stack((self._target.rows(units.each(units.kv_heads)), units.slots))
        return torch.from_numpy(head_slots).to(self._keys.device)

    def _write(self, where: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys, values [tokens, D] into their slots."""
        self._keys[where[0], where[1]] = keys
        self._values[where[0], where[1]] = values


@dataclass
class Arrival:
    """Units on their way to the slots of one part of a layer."""

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
        under_way: dict[int, list[Arrival]],
    ) -> None:
        """shared: the slots that KV heads share; empty: none are. under_way: the memory's (Memory.under_way)."""
        self._layout, self._hot, self._shared, self._cold, self._spans = layout, hot, shared, cold, spans
        self._transfers, self._link, self._log = transfers, link, log
        keys = hot.example
        size = layout.staging_bytes // keys.dtype.itemsize
        self.buffers = [
            Buffer(torch.zeros(size, dtype=keys.dtype, device=keys.device)) for _ in range(layout.staging_buffers)
        ]
        self._stage = Stage(self.buffers, layout.streamed)
        self.parts = RecalledParts(spans, hot.shape.kv_heads, log)
        self.under_way = under_way

    def fetch(self, layer: int, missing: Missing, cause: str, blocking: bool) -> None:
        """Begin the copies, one for each part of the layer."""
        if self._shared:
            slots = self._shared[self._layout.shared_zone(layer)]
            self._fetch_into(None, Target(slots.keys[None], slots.values[None], None), layer, missing, cause, blocking)
            return
        for pool in self._hot.parts[layer]:
            in_pool = (missing.kv_heads >= pool.heads.start) & (missing.kv_heads < pool.heads.stop)
            if in_pool.any():
                units = missing if in_pool.all() else missing.where(in_pool)
                self._fetch_into(pool, pool.target(layer), layer, units, cause, blocking)

    def _fetch_into(
        self, pool: Pool | None, target: Target, layer: int, units: Missing, cause: str, blocking: bool
    ) -> None:
        whole = self._spans.host_lengths[units.spans] == units.counts
        assert (whole | ~units.packed).all(), "part of a span can be recalled only where it is stored raw"
        sizes = units.counts * self._hot.shape.head_token_bytes
        if units.packed.any():
            stored = self._cold.size[self._cold.place[layer], units.kv_heads, units.spans]
            sizes = np.where(units.packed, stored, sizes)
        entry = self._transfers.open(layer, units.kv_heads, units.spans, "h2d", cause, sizes, blocking)
        limits = self._layout.recall_spans
        longest = limits[1] if limits is not None else 0 if pool is None else pool.zones.recall
        batch = RecallBatch(layer, units, target, self._cold, self._spans, self._stage, longest)
        self.under_way.setdefault(layer, []).append(Arrival(units, pool, self._link.bring(entry, batch)))

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and name the slots they filled, so that they can be attended."""
        if layer in self.under_way:
            phase = self._log.clock.enter("wait")
            self._wait(self.under_way[layer])
            self._log.clock.enter("copy")
            for arrival in self.under_way.pop(layer):
                self._name(layer, arrival)
            self._log.clock.enter(phase)
        if layer in self.parts.zones:
            self.parts.log(layer)

    def _name(self, layer: int, arrival: Arrival) -> None:
        units, entry, pool = arrival.units, arrival.ticket.entry, arrival.pool
        slots = self._shared[self._layout.shared_zone(layer)] if pool is None else pool
        slots.name(layer, units.names(self._spans.host_starts))
        self._spans.mark(layer, (units.kv_heads, units.spans), hot=True)
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
    def _wait(arrivals: Sequence[Arrival]) -> None:
        """Wait for the last copy first: the link works in order, so the last one carries the waiting time."""
        for arrival in reversed(arrivals):
            arrival.ticket.wait()
