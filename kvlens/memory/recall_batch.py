"""What a layer's KV heads miss, as rows: which units, into which slots, and how a link carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch

from kvlens.memory.codec import Codec, Units
from kvlens.memory.cold_tier import ColdTier
from kvlens.memory.copies import Move, Numbers, Tokens
from kvlens.memory.link import Buffer, Moving, Part
from kvlens.memory.recall_zone import Plan, TokenPlan
from kvlens.memory.span_table import SpanTable


@dataclass(frozen=True)
class Fetches:
    """Units of one layer on their way into its slots. kv_heads, spans, counts (tokens), firsts (which of the span's
    tokens comes first) int64 [n]; slots int64 [sum of counts], unit after unit; packed bool [n]."""

    kv_heads: np.ndarray
    spans: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    slots: np.ndarray
    packed: np.ndarray
    within: np.ndarray | None = None

    @staticmethod
    def of(plan: Plan, cold: ColdTier, layer: int) -> Fetches:
        """What a layer's KV heads miss, in the plan's order."""
        heads, spans, firsts, counts = plan.missing
        return Fetches(heads, spans, firsts, counts, plan.slots, cold.packed(layer, heads, spans))

    @staticmethod
    def of_tokens(plan: TokenPlan, spans: SpanTable) -> Fetches:
        """The plan's tokens, those of one KV head and span as one unit."""
        owner = spans.owners(plan.positions)
        breaks = np.flatnonzero(np.diff(plan.heads) | np.diff(owner)) + 1
        at = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((at, [len(owner)])))
        within = plan.positions - spans.first_positions(owner)
        raw = np.zeros(len(at), dtype=bool)
        return Fetches(plan.heads[at], owner[at], within[at], counts, plan.slots, raw, within)

    def __len__(self) -> int:
        return len(self.spans)

    def each(self, of_units: np.ndarray) -> np.ndarray:
        """[n] -> one for every token."""
        return np.repeat(of_units, self.counts)

    def offsets(self) -> np.ndarray:
        """Which token of its span each token is."""
        if self.within is not None:
            return self.within
        ends = self.counts.cumsum()
        return np.arange(len(self.slots)) - self.each(ends - self.counts) + self.each(self.firsts)

    def where(self, chosen: np.ndarray) -> Fetches:
        """Those of the units that are `chosen` bool [n]."""
        tokens = self.each(chosen)
        within = None if self.within is None else self.within[tokens]
        heads, spans, firsts, counts = (x[chosen] for x in (self.kv_heads, self.spans, self.firsts, self.counts))
        return Fetches(heads, spans, firsts, counts, self.slots[tokens], self.packed[chosen], within)


class Stage:
    """Staging buffers, which units take in turn. streamed: all units pass through them, and one is filled while the
    other is spread."""

    def __init__(self, buffers: Sequence[Buffer], streamed: bool) -> None:
        self.buffers, self.streamed, self._turns = buffers, streamed, count()

    def next(self) -> Buffer:
        return self.buffers[next(self._turns) % len(self.buffers)]


@dataclass(frozen=True)
class Between:
    """The two sides of the recalls of a layer's part. keys, values [h, C, D]: its slots, of the KV heads from `first`
    on; longest: tokens of a span that can be wished for."""

    cold: ColdTier
    codec: Codec
    spans: SpanTable
    stage: Stage
    longest: int
    keys: torch.Tensor
    values: torch.Tensor
    first: int = 0


class Recalled:
    """Fetches as the link carries them (kvlens.memory.link.Batch)."""

    def __init__(self, layer: int, fetches: Fetches, between: Between) -> None:
        self._layer, self._fetches, self._of = layer, fetches, between

    def whole(self) -> tuple[Sequence[Moving], Callable[[], None] | None]:
        raw, packed = (self._fetches.where(self._fetches.packed == form) for form in (False, True))
        moves: list[Moving] = [self._tokens(raw)] if len(raw) else []
        if not len(packed):
            return moves, None
        flat, units, sizes = self._packed(packed)
        numbers = torch.empty(int(sizes.sum()), dtype=flat.dtype)
        moves.append(Numbers(numbers, flat, units.table[:, 0].numpy().copy(), sizes))
        units.table[:, 0] = torch.from_numpy(sizes.cumsum() - sizes)

        def rebuild() -> None:
            keys, values = self._of.codec.unpack(numbers, units)
            live = torch.arange(units.tokens) < units.table[:, 1, None]
            self._write(self._where(packed), keys[live], values[live])

        return moves, rebuild

    def parts(self) -> Iterator[Part]:
        fetches, streamed = self._fetches, self._of.stage.streamed
        raw = fetches.where(~fetches.packed)
        if len(raw) and not streamed:
            yield Part(self._tokens(raw))
        for unit in range(len(fetches)):
            if streamed or fetches.packed[unit]:
                yield self._staged(fetches.where(np.arange(len(fetches)) == unit))

    def _tokens(self, fetches: Fetches) -> Tokens:
        """Rows straight into their slots."""
        cold, heads = self._of.cold, fetches.each(fetches.kv_heads)
        positions = fetches.each(self._of.spans.first_positions(fetches.spans)) + fetches.offsets()
        pool = cold.layer(self._layer)
        rows = cold.keys_at(heads, positions)
        keys, values = self._of.keys, self._of.values
        at = heads - self._of.first
        return Tokens(keys, values, pool.view(-1, pool.shape[-1]), rows, cold.page, at, fetches.slots)

    def _staged(self, one: Fetches) -> Part:
        """A unit through a staging buffer. What its spreading needs on the device is there before it begins."""
        stage = self._of.stage
        buffer, where = stage.next(), self._where(one)
        head, span, first, tokens = (int(x[0]) for x in (one.kv_heads, one.spans, one.firsts, one.counts))
        unit = self._of.cold.unit(self._layer, span, head)
        source = unit if one.packed[0] else unit[:, first : first + tokens]
        staged = buffer.tensor[: source.numel()].view(source.shape)
        spread = partial(self._write, where, staged[0], staged[1])
        if one.packed[0]:
            _, units, _ = self._packed(one)
            units.table[:, 0] = 0
            spread = partial(self._rebuild_one, where, staged, units.to(staged.device), tokens)
        return Part(Move(staged, source), spread, buffer if stage.streamed else None)

    def _packed(self, fetches: Fetches) -> tuple[torch.Tensor, Units, np.ndarray]:
        """The layer's flat pool, the units as they lie there, and their sizes in numbers."""
        cold, at = self._of.cold, self._of.cold.at(self._layer)
        heads, spans = (torch.from_numpy(x) for x in (fetches.kv_heads, fetches.spans))
        starts = torch.from_numpy(self._of.spans.first_positions(fetches.spans))
        dim, longest = self._of.keys.shape[-1], self._of.longest
        units = Units(cold.table[at, heads, spans], starts, self._layer, longest, dim, heads)
        sizes: np.ndarray = cold.size[at, fetches.kv_heads, fetches.spans] // cold.dtype.itemsize
        return cold.flat[at], units, sizes

    def _rebuild_one(self, where: torch.Tensor, staged: torch.Tensor, units: Units, tokens: int) -> None:
        keys, values = self._of.codec.unpack(staged, units)
        self._write(where, keys[0, :tokens], values[0, :tokens])

    def _where(self, fetches: Fetches) -> torch.Tensor:
        """int64 [2, tokens]: KV head of the part and slot of every token."""
        found = np.stack((fetches.each(fetches.kv_heads) - self._of.first, fetches.slots))
        return torch.from_numpy(found).to(self._of.keys.device)

    def _write(self, where: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values [tokens, D]."""
        self._of.keys[where[0], where[1]] = keys
        self._of.values[where[0], where[1]] = values
