"""Layers with a sliding window on which no method acts: each keeps its newest tokens exactly, in a ring.

The method's memory does not have these layers. It numbers its own layers from 0 on; `numbers` has the model's number of
each. Shapes: H_kv KV heads, G query heads of each, W tokens of a window, D head size, m live slots of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from kvlens.holds import Drop, Hold
from kvlens.instruments import CutRow
from kvlens.kernels.attend import LayerForm, decode_attention
from kvlens.memory.counterfactual import Counterfactual
from kvlens.rows import EventRow, SpanHeadRow, SpanRow, TransferRow
from kvlens.shape import KVShape
from kvlens.tiers.slots import PromptStore, SpanTable

Row = TypeVar("Row", CutRow, EventRow, SpanHeadRow, TransferRow)


class WindowedLayers:
    """Owns keys and values of these layers: per layer a ring [2, H_kv, W, D]. Empty where no layer has a window that
    binds, or a method acts on the layers that have one."""

    def __init__(
        self,
        shape: KVShape,
        reference: bool,
        prompt_tokens: int,
        drops: Sequence[Drop],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """shape: of the model, with the windows that bind; reference: the run is full KV."""
        apart = shape.acting(reference).layers < shape.layers
        self.shape, self.first, self._device = shape, prompt_tokens, device
        self.numbers = shape.global_layers if apart else tuple(range(shape.layers))
        """the model's number of each of the method's layers"""
        self.own = {layer: number for number, layer in enumerate(self.numbers)}
        """the method's number of a layer of the model, of the layers that are not here"""
        size = (2, shape.kv_heads, shape.head_dim)
        self.rings = {
            layer: torch.zeros(*size[:2], window, size[2], dtype=dtype, device=device)
            for layer, window in enumerate(shape.windows if apart else ())
            if window
        }
        self._drops: dict[int, list[tuple[int, Drop]]] = {}
        for drop in drops:
            for layer, head in drop.heads:
                if layer in self.rings:
                    self._drops.setdefault(layer, []).append((head, drop))
        self._events: list[EventRow] = []
        self.newest = prompt_tokens - 1
        """position of the newest token"""

    # ---- keys and values
    def place(self, prompt: PromptStore) -> PromptStore:
        """Take the newest prompt tokens into the rings; return the prompt of the method's layers."""
        for layer, ring in self.rings.items():
            positions = torch.arange(max(0, prompt.tokens - ring.shape[2]), prompt.tokens, device=ring.device)
            for side, tokens in zip(ring, (prompt.keys, prompt.values), strict=True):
                side[:, positions % ring.shape[2]] = tokens[layer][:, positions]
        return prompt.part(self.numbers) if self.rings else prompt

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's token in place of the oldest: keys, values [H_kv, D]."""
        ring = self.rings[layer]
        slot = self.newest % ring.shape[2]
        ring[0, :, slot], ring[1, :, slot] = keys, values

    def positions(self, layer: int) -> torch.Tensor:
        """Return the position int64 [m] of the token in each live slot."""
        ring = self.rings[layer]
        slots = torch.arange(min(ring.shape[2], self.newest + 1), device=ring.device)
        return self.newest - (self.newest - slots) % ring.shape[2]

    def live(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the live keys and values [H_kv, m, D]."""
        keys, values = self.rings[layer][:, :, : self.newest + 1].unbind()
        return keys, values

    def attend(
        self, layer: int, q: torch.Tensor, scaling: float, form: LayerForm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention output of q [1, Hq, 1, D], and the bias [H_kv, G, m] where tokens are dropped."""
        bias = self._bias(layer)
        return decode_attention(q, *self.live(layer), bias, scaling, None, form), bias

    def _bias(self, layer: int) -> torch.Tensor | None:
        step = self.newest - self.first
        drops = [(head, drop) for head, drop in self._drops.get(layer, ()) if drop.from_step <= step]
        if not drops:
            return None
        positions = self.positions(layer)
        hidden = torch.zeros(self.shape.kv_heads, len(positions), dtype=torch.bool, device=positions.device)
        for head, drop in drops:
            hidden[head] |= (positions >= drop.tok_start) & (positions < drop.tok_end)
        hidden &= positions != self.newest
        bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -torch.inf)
        return bias[:, None].expand(-1, self.shape.group, -1).contiguous()

    # ---- the method's layers
    def counterfactual(
        self, holds: Sequence[Hold], drops: Sequence[Drop], shape: KVShape, max_new: int
    ) -> Counterfactual | None:
        """Return what a run holds and drops, in the method's numbers of layers, and what the windows of `shape`, the
        method's, hide; None: nothing. A window holds its tokens anyway, and nothing else: a hold there is left out."""

        def own(heads: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
            pairs = ((self.own.get(layer), head) for layer, head in heads)
            return tuple((layer, head) for layer, head in pairs if layer is not None)

        held = [replace(hold, heads=own(hold.heads)) for hold in holds]
        dropped = [replace(drop, heads=own(drop.heads)) for drop in drops]
        holds, drops = [hold for hold in held if hold.heads], [drop for drop in dropped if drop.heads]
        if not (holds or drops or shape.windows):
            return None
        tokens = self.first + max_new
        return Counterfactual(holds, drops, shape.kv_heads, self.first, tokens, self._device, shape.windows)

    # ---- the log
    def open_spans(self, spans: Sequence[SpanRow], step: int) -> None:
        """Log which new spans lie outside a window (evict), in part (thin), or inside though the method gives them away
        (kept)."""
        for layer, ring in self.rings.items():
            oldest = self.newest + 1 - ring.shape[2]
            for row in spans:
                kind = "evict" if row.tok_end <= oldest else "thin" if row.tok_start < oldest else "kept"
                if row.kind != "window" and (kind != "kept" or row.state != "resident"):
                    self._events.append(EventRow(step, layer, None, None, kind, row.span))

    def begin_step(self, step: int, table: SpanTable, first_new: int) -> None:
        """The step's token takes the place of the oldest one in each full ring. Spans from `first_new` on are new."""
        if not self.rings:
            return
        owner, spans = table.owner, table.rows
        self.open_spans(spans[first_new:], step)
        self.newest += 1
        for layer, ring in self.rings.items():
            leaving = self.newest - ring.shape[2]
            span = int(owner[leaving]) if 0 <= leaving < len(owner) else 0
            if span and leaving in (spans[span].tok_start, spans[span].tok_end - 1):
                kind = "evict" if leaving == spans[span].tok_end - 1 else "thin"
                self._events.append(EventRow(step, layer, None, None, kind, span))

    def take_events(self) -> list[EventRow]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def model_rows(self, rows: list[Row]) -> list[Row]:
        """Return rows of the method's memory with the model's numbers of layers: a row for all layers becomes one for
        each of the method's layers, unless it opens a span."""
        if not self.rings:
            return rows
        numbered: list[Row] = []
        for row in rows:
            if row.layer is not None:
                numbered.append(replace(row, layer=self.numbers[row.layer]))
            elif isinstance(row, EventRow) and row.kind == "span_open":
                numbered.append(row)
            else:
                numbered += [replace(row, layer=layer) for layer in self.numbers]
        return numbered

    def spread(self, columns: np.ndarray, rest: float = 0.0) -> np.ndarray:
        """Return columns [l, H_kv] of the method's layers as [L, H_kv] of the model's; rest: of the layers here."""
        if not self.rings:
            return columns
        whole = np.full((self.shape.layers, *columns.shape[1:]), rest, dtype=columns.dtype)
        whole[list(self.numbers)] = columns
        return whole

    def spread_hot(self, hot: torch.Tensor) -> torch.Tensor:
        """Return a table [l, ...] of the method's layers as [L, ...] of the model's, False in the layers here."""
        if not self.rings:
            return hot
        whole = hot.new_zeros(self.shape.layers, *hot.shape[1:])
        whole[list(self.numbers)] = hot
        return whole

    @property
    def head_bytes(self) -> np.ndarray:
        """Device bytes [L, H_kv] of the rings."""
        size = np.zeros((self.shape.layers, self.shape.kv_heads))
        for layer, ring in self.rings.items():
            size[layer] = ring.shape[2] * self.shape.head_token_bytes
        return size
