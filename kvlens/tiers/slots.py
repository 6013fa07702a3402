"""Where keys and values are on the device: the prompt while it is read, the slots of a layer, and the slots of a recall
zone that several KV heads share, of one layer or of the whole model. The span table names the spans in them.

A shared slot belongs to one KV head at a time. An attention kernel with a table of slots per KV head reads them in
place; here the attention of a layer reads a copy that lasts for this attention. Shapes: M shared slots, h KV heads, C
slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from kvlens.rows import ROLES, SpanRow
from kvlens.shape import KVShape

ROLE = {name: code for code, name in enumerate(ROLES)}
EXACT = tuple(ROLE[name] for name in ("sink", "anchor", "window", "resident"))
"""role codes of tokens that are attended as they are"""
FREE = len(ROLES)
"""Role code of a slot that holds nothing (or a copy that has not landed)."""
WINDOW = 0
"""Span id of the window: the positions that no other span has."""


class PromptStore:
    """Owns keys, values [L, H_kv, n, D] of the n prompt tokens that prefill covers, and how many of them each layer has
    seen."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        self.tokens = tokens
        size = (shape.layers, shape.kv_heads, tokens, shape.head_dim)
        # not written before the prompt is: a reading that is shared takes their place
        self.keys, self.values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        self.seen = [0] * shape.layers
        """tokens that each layer has seen"""

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a chunk of one layer: keys, values [H_kv, m, D]. Raises AssertionError past the announced number of
        tokens."""
        start, m = self.seen[layer], keys.shape[1]
        assert start + m <= self.tokens, f"layer {layer}: {start + m} prompt tokens, {self.tokens} announced"
        self.keys[layer, :, start : start + m], self.values[layer, :, start : start + m] = keys, values
        self.seen[layer] = start + m

    def part(self, layers: Sequence[int]) -> PromptStore:
        """Return a copy of some layers, in this order. All of the prompt has been seen."""
        part = object.__new__(PromptStore)
        part.tokens, part.seen = self.tokens, [self.seen[layer] for layer in layers]
        part.keys, part.values = self.keys[list(layers)], self.values[list(layers)]
        return part

    def share(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold keys, values [L, H_kv, n, D] that another reading of the prompt holds too, without a copy. No run
        may write to them. Raises AssertionError unless they are of the announced size and form."""
        for held, shared in ((self.keys, keys), (self.values, values)):
            assert (held.shape, held.dtype, held.device) == (shared.shape, shared.dtype, shared.device), shared.shape
        self.keys, self.values, self.seen = keys, values, [self.tokens] * len(self.seen)

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, values [1, H_kv, seen, D] of the tokens that one layer has seen."""
        tokens = self.seen[layer]
        return self.keys[layer, None, :, :tokens], self.values[layer, None, :, :tokens]


@dataclass(frozen=True)
class Slots:
    """Slots of one layer, of all its KV heads or a part of them: keys, values [h, C, D]; position, span int32 and role
    uint8 [h, C]. Views, not copies."""

    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    span: torch.Tensor
    role: torch.Tensor

    def between(self, start: int, end: int | None) -> Slots:
        """Return the slots from `start` on and below `end`."""
        return Slots(*(tensor[:, start:end] for tensor in vars(self).values()))

    def beside(self, further: Slots) -> Slots:
        """Return copies of these slots with the other slots behind them."""
        pairs = zip(vars(self).values(), vars(further).values(), strict=True)
        return Slots(*(torch.cat(pair, 1) for pair in pairs))


@dataclass(frozen=True)
class SlotNames:
    """What slots of a layer's KV heads hold once they are filled, on the host, [n]: kv_heads, slots int64, which slots;
    position, span int32, role uint8, as `Slots` has them."""

    kv_heads: np.ndarray
    slots: np.ndarray
    position: np.ndarray
    span: np.ndarray
    role: np.ndarray


class SharedSlots:
    """Owns keys, values [M, D] and their tables [M]: position, span and owner int32, role uint8. The owner of a slot is
    layer * KV heads + KV head."""

    def __init__(self, size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kv_heads = kv_heads
        self.keys = torch.zeros(size, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.position = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.span = torch.zeros(size, dtype=torch.int32, device=device)
        self.owner = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.role = torch.full((size,), FREE, dtype=torch.uint8, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors."""
        return self.keys, self.values, self.position, self.span, self.owner, self.role

    def name(self, layer: int, names: SlotNames) -> None:
        """Name slots that a layer's KV heads have filled."""
        where = torch.from_numpy(names.slots).to(self.role.device)
        owner = (layer * self._kv_heads + names.kv_heads).astype(np.int32)
        named = (self.owner, owner), (self.position, names.position), (self.span, names.span), (self.role, names.role)
        for table, values in named:
            table.index_copy_(0, where, torch.from_numpy(values).to(where.device))

    def copy_slots(self, layer: int, heads: range) -> Slots:
        """Return copies of the slots of some KV heads of a layer [h, w, ...], w being the most that one of them has;
        the others are filled up with slots that hold nothing."""
        index, live = (self._owned_on_host if self.owner.device.type == "cpu" else self._owned)(layer, heads)
        places = index.flatten()
        keys, values, position, span, role = (
            tensor.index_select(0, places).unflatten(
                0, index.shape
            )  # on a CPU three to six times as fast as tensor[index]
            for tensor in (self.keys, self.values, self.position, self.span, self.role)
        )
        return Slots(keys, values, position, span, torch.where(live, role, FREE))

    def _owned(self, layer: int, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of KV heads int64 [h, w] in their order, 0 behind a head's last, and which of them are
        theirs, bool [h, w]."""
        codes = layer * self._kv_heads + torch.arange(heads.start, heads.stop, device=self.owner.device)
        owned = (self.owner == codes[:, None]) & (self.role != FREE)
        counts = owned.sum(1)
        width = int(counts.max()) if owned.numel() else 0
        live = torch.arange(width, device=owned.device) < counts[:, None]
        return torch.zeros_like(live, dtype=torch.long).masked_scatter_(live, owned.nonzero()[:, 1]), live

    def _owned_on_host(self, layer: int, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, looking once at each slot for all KV heads."""
        head = self.owner.numpy() - (layer * self._kv_heads + heads.start)
        where = ((head >= 0) & (head < len(heads)) & (self.role.numpy() != FREE)).nonzero()[0]
        head = head[where]
        counts = np.bincount(head, minlength=len(heads))
        live = np.arange(counts.max(initial=0)) < counts[:, None]
        index = np.zeros(live.shape, np.int64)
        index[live] = where[head.argsort(kind="stable")]
        return torch.from_numpy(index), torch.from_numpy(live)


@dataclass(frozen=True)
class Target:
    """The slots that units go to: keys, values [h, C, D]. first_head: the KV head of row 0; None: all KV heads share
    one row."""

    keys: torch.Tensor
    values: torch.Tensor
    first_head: int | None

    def rows(self, kv_heads: np.ndarray) -> np.ndarray:
        """Return the row of each KV head int64 [n]."""
        return np.zeros_like(kv_heads) if self.first_head is None else kv_heads - self.first_head


class SpanTable:
    """Spans with ids 0..capacity-1, shared by all layers. Fixed width, so that selections are tables of fixed width
    too.

    On the device: `lengths` float32 [S], tokens of each span (1 for ids not in use, so that log|S| stays finite),
    `log_lengths`, `starts` int32 [S], their first positions, `selectable` bool [S], spans that are attended where the
    selection says so, and `is_hot` bool [L, H_kv, S], spans whose tokens are in slots.
    """

    def __init__(self, capacity: int, device: torch.device, layers: int = 1, kv_heads: int = 1) -> None:
        self.capacity = capacity
        self.rows: list[SpanRow] = []
        self.lengths = torch.ones(capacity, device=device)
        self.log_lengths = torch.zeros(capacity, device=device)
        self.starts = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.selectable = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.is_hot = torch.zeros(layers, kv_heads, capacity, dtype=torch.bool, device=device)
        self.host_lengths = np.ones(capacity, dtype=np.int64)
        """`lengths` on the host"""
        self.host_starts = np.zeros(capacity, dtype=np.int64)
        """`starts` on the host"""
        self.owner = np.empty(0, dtype=np.int64)
        """int64 on the host: span of each position that a span other than the window has had"""
        self._taken = 0

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Sequence[SpanRow]) -> list[int]:
        """Give each row the next id (its own `span` field is ignored). Raises AssertionError when the table is full."""
        ids = list(range(len(self.rows), len(self.rows) + len(rows)))
        assert len(self.rows) + len(rows) <= self.capacity, f"span table full: {self.capacity}"
        for span, row in zip(ids, rows, strict=True):
            self.rows.append(replace(row, span=span))
            self.host_lengths[span] = self.lengths[span] = max(1, row.tok_end - row.tok_start)
            self.log_lengths[span] = self.lengths[span].log()
            self.host_starts[span] = self.starts[span] = row.tok_start
            if span != WINDOW:
                missing = max(0, row.tok_end - len(self.owner))
                self.owner = np.concatenate((self.owner, np.full(missing, WINDOW)))
                self.owner[row.tok_start : row.tok_end] = span
        return ids

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tables on the device."""
        return self.lengths, self.log_lengths, self.starts, self.selectable, self.is_hot

    def ranges(self) -> torch.Tensor:
        """Return int64 [spans, 2] on the host: first position and the one after the last, as they were at birth."""
        return torch.tensor([(row.tok_start, row.tok_end) for row in self.rows], dtype=torch.long).view(-1, 2)

    def covered(self, mask: torch.Tensor) -> torch.Tensor:
        """Return bool [h, S]: spans that have tokens, all of which are in mask bool [h, P + 1] of the positions below
        P."""
        count = F.pad(mask[:, :-1].long().cumsum(1), (1, 0))
        start, end = self.ranges().clamp(max=count.shape[1] - 1).to(mask.device).unbind(1)
        whole = (count[:, end] - count[:, start] == end - start) & (end > start)
        return F.pad(whole, (0, self.capacity - whole.shape[1]))

    def mark(self, layer: int, units: np.ndarray | tuple[np.ndarray, np.ndarray], hot: bool) -> None:
        """Note that a layer's slots have units, KV heads and spans int64 [n] each, or that they have nothing of
        them."""
        where = torch.from_numpy(units[0] * self.capacity + units[1]).to(self.is_hot.device)
        self.is_hot[layer].view(-1).index_fill_(0, where, hot)

    def take_new(self) -> list[SpanRow]:
        """Return the rows added since the last call."""
        new, self._taken = self.rows[self._taken :], len(self.rows)
        return new
