"""Units on their way from the cold tier into the slots of a layer: what the KV heads miss, and how a link copies it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvlens.link.codec import Units
from kvlens.link.copies import Move, Numbers, Tokens
from kvlens.link.host_link import Moving, Part, Stage
from kvlens.memory.cold_tier import ColdTier
from kvlens.memory.hot_tier import Pool
from kvlens.memory.slots import ROLE, SpanTable
from kvlens.memory.zones import Plan, TokenPlan


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

    @staticmethod
    def by_span(plan: Plan, cold: ColdTier, layer: int) -> Missing:
        """Return the units that a layer's KV heads miss, in the plan's order."""
        heads, spans, firsts, counts = plan.missing
        return Missing(heads, spans, firsts, counts, plan.slots, cold.packed(layer, heads, spans))

    @staticmethod
    def by_token(plan: TokenPlan, spans: SpanTable) -> Missing:
        """Return the plan's tokens, those of one KV head and span as one unit."""
        owner = spans.owner[plan.positions]
        breaks = np.flatnonzero(np.diff(plan.heads) | np.diff(owner)) + 1
        begins = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((begins, [len(owner)])))
        within = plan.positions - spans.host_starts[owner]
        raw = np.zeros(len(begins), dtype=bool)
        return Missing(plan.heads[begins], owner[begins], within[begins], counts, plan.slots, raw, within)

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

    def named(self, starts: np.ndarray, first_head: int) -> np.ndarray:
        """Return int64 [5, tokens]: KV head from `first_head` on, slot, position, span and role of every token.
        starts int64 [S]: first position of each span."""
        roles = np.where(self.packed, ROLE["reconstructed"], ROLE["resident"])
        heads, begins, spans, roles = np.repeat(
            np.stack((self.kv_heads - first_head, starts[self.spans], self.spans, roles)), self.counts, axis=1
        )
        return np.stack((heads, self.slots, begins + self.offsets(), spans, roles))

    def where(self, mask: np.ndarray) -> Missing:
        """Return the units in `mask` bool [n]."""
        tokens = self.each(mask)
        within = None if self.within is None else self.within[tokens]
        heads, spans, firsts, counts = (x[mask] for x in (self.kv_heads, self.spans, self.firsts, self.counts))
        return Missing(heads, spans, firsts, counts, self.slots[tokens], self.packed[mask], within)


@dataclass(frozen=True)
class Target:
    """The slots that units go to: keys, values [h, C, D]. first_head: the KV head of row 0; None: all KV heads share
    one row."""

    keys: torch.Tensor
    values: torch.Tensor
    first_head: int | None

    @staticmethod
    def of_pool(pool: Pool, layer: int) -> Target:
        """Return a layer's slots in a pool."""
        row = layer - pool.layers.start
        return Target(pool.keys[row], pool.values[row], pool.heads.start)

    def rows(self, kv_heads: np.ndarray) -> np.ndarray:
        """Return the row of each KV head int64 [n]."""
        return np.zeros_like(kv_heads) if self.first_head is None else kv_heads - self.first_head


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
        raw, packed = self._units.where(~self._units.packed), self._units.where(self._units.packed)
        moves: list[Moving] = [self._tokens(raw)] if len(raw) else []
        if not len(packed):
            return moves, None
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
