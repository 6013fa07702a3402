"""The run's spans: which token range each id means, how long it is, in which state it was born."""

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
    `log_lengths`, and `starts` int32 [S], their first positions.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.rows: list[SpanRow] = []
        self.lengths = torch.ones(capacity, device=device)
        self.log_lengths = torch.zeros(capacity, device=device)
        self.starts = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.host_lengths = np.ones(capacity, dtype=np.int64)
        """tokens of each span, as `lengths`"""
        self._host_starts = np.zeros(capacity, dtype=np.int64)
        self._owner = np.empty(0, dtype=np.int64)
        self._born: list[SpanRow] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Sequence[SpanRow]) -> list[int]:
        """Give each row the next id (its own `span` field is ignored). Raises AssertionError when the table is full."""
        ids = list(range(len(self.rows), len(self.rows) + len(rows)))
        assert len(self.rows) + len(rows) <= self.capacity, f"span table full: {self.capacity}"
        for span, row in zip(ids, rows, strict=True):
            stored = dataclasses.replace(row, span=span)
            self.rows.append(stored)
            self._born.append(stored)
            self.host_lengths[span] = self.lengths[span] = max(1, row.tok_end - row.tok_start)
            self.log_lengths[span] = self.lengths[span].log()
            self._host_starts[span] = self.starts[span] = row.tok_start
            if span != WINDOW:
                missing = max(0, row.tok_end - len(self._owner))
                self._owner = np.concatenate((self._owner, np.full(missing, WINDOW)))
                self._owner[row.tok_start : row.tok_end] = span
        return ids

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.lengths, self.log_lengths, self.starts

    def ranges(self) -> torch.Tensor:
        """int64 [spans, 2] on the host: first position and the one after the last, as they were at birth."""
        return torch.tensor([(row.tok_start, row.tok_end) for row in self.rows], dtype=torch.long).view(-1, 2)

    def tokens(self, span: int) -> int:
        """Tokens of a span, read on the host."""
        return int(self.host_lengths[span])

    def token_counts(self, spans: np.ndarray) -> np.ndarray:
        """Tokens of spans [n], read on the host."""
        found: np.ndarray = self.host_lengths[spans]
        return found

    def first_positions(self, spans: np.ndarray) -> np.ndarray:
        """Positions that spans [n] begin with, read on the host."""
        found: np.ndarray = self._host_starts[spans]
        return found

    def owners(self, positions: np.ndarray) -> np.ndarray:
        """The spans, other than the window, that positions [n] lie in."""
        found: np.ndarray = self._owner[positions]
        return found

    def drain_born(self) -> list[SpanRow]:
        """Rows added since the last call."""
        born, self._born = self._born, []
        return born
