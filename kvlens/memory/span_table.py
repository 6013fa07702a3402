"""The run's spans: the token range of each id, its length, the state it was born in, and the KV heads that have its
tokens in slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from kvlens.rows import SpanRow

WINDOW = 0
"""Span id of the window: the positions that no other span has."""


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
            self.rows.append(dataclasses.replace(row, span=span))
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

    def mark(self, layer: int, units: np.ndarray, hot: bool) -> None:
        """Note that a layer's slots have units int64 [2, n], KV heads and spans, or that they have nothing of them."""
        heads, spans = torch.from_numpy(units).to(self.is_hot.device)
        self.is_hot[layer][heads, spans] = hot

    def take_new(self) -> list[SpanRow]:
        """Return the rows added since the last call."""
        new, self._taken = self.rows[self._taken :], len(self.rows)
        return new
