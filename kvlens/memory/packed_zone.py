"""The packed zone: tokens that stay on the device in few bits when they leave the window.

Every KV head of every layer holds the same positions, from 0 on without a gap: one table names them all. Keys are
packed as whole groups leave the window; values one by one, so that the newest `residual` stay exact.
Shapes: L layers, H_kv KV heads, N tokens, D head size, g tokens or channels of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from kvlens.memory.hot_tier import Pool
from kvlens.memory.layout import Quantised
from kvlens.memory.log import MemoryLog
from kvlens.memory.packed_codes import open_codes
from kvlens.memory.slots import ROLE, PromptStore, Slots
from kvlens.memory.span_table import WINDOW
from kvlens.rows import SpanHeadRow, SpanRow
from kvlens.shape import KVShape

Read = Callable[[int, slice], torch.Tensor]
"""layer, KV heads -> what lies packed of them [h, m, D]"""


class PackedZone:
    """Owns the codes of all layers (kvlens/memory/packed_codes.py), and which span each position belongs to."""

    def __init__(
        self, shape: KVShape, form: Quantised, dtype: torch.dtype, device: torch.device, log: MemoryLog
    ) -> None:
        self.shape, self.form, self.dtype, self._log = shape, form, dtype, log
        self.is_ragged = False
        """every KV head holds the same positions"""
        self._keys, self._values, self._shared = open_codes(shape, form, shape.kv_heads, dtype, device)
        self.owner = torch.zeros(form.key_groups * form.group, dtype=torch.int32, device=device)
        self.keys_until = self.values_until = 0
        """positions below them are packed"""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *self._keys.tensors(), *self._values.tensors(), *self._shared, self.owner

    # ---------------------------------------------------------------------------------------------------------- writing
    def place(self, pools: Sequence[Pool], spans: Sequence[SpanRow], prompt: PromptStore, until: int) -> None:
        """The prompt: keys below `until`, values but for the newest `residual`, which go to the rings beside the
        window's keys. spans: of the positions below `until`."""
        exact = max(prompt.tokens - self.form.residual, 0)
        for pool in pools:
            slots = pool.window_slots(exact, until)
            pool.values[:, :, slots] = prompt.values[pool.index][:, :, exact:until]
            for layer in pool.layers:
                self._put_keys(layer, pool.index[1], prompt.keys[layer, pool.index[1], :until])
                self._put_values(layer, pool.index[1], prompt.values[layer, pool.index[1], :exact])
        self.values_until = exact
        self._named(spans, until)
        if spans:
            keys = [self._off(layer, prompt.keys[layer, :, :until], spans, self.keys) for layer in self._layers]
            whole = [row for row in spans if row.tok_end <= exact]
            values = [self._off(layer, prompt.values[layer, :, :exact], whole, self.values) for layer in self._layers]
            self._log_errors(spans, keys, values)

    def leave(self, pools: Sequence[Pool], spans: Sequence[SpanRow], start: int, end: int) -> None:
        """Keys of positions [start, end) leave the rings; their values follow one by one. spans: of these positions."""
        assert start == self.keys_until, (start, self.keys_until)
        exact = torch.empty(self.shape.layers, self.shape.kv_heads, end - start, self.shape.head_dim)
        exact = exact.to(self.owner.device)
        for pool in pools:
            exact[pool.index] = pool.keys[:, :, pool.window_slots(start, end)].float()
            for layer in pool.layers:
                self._put_keys(layer, pool.index[1], exact[layer, pool.index[1]].to(self.dtype))
        self._named(spans, end)
        errors = [self._off(layer, exact[layer], spans, self.keys, start) for layer in self._layers]
        self._log_errors(spans, errors, [])

    def values_to(self, pools: Sequence[Pool], until: int) -> None:
        """Values of positions below `until` are packed from now on."""
        if until <= self.values_until:
            return
        for pool in pools:
            slots = pool.window_slots(self.values_until, until)
            for layer in pool.layers:
                self._put_values(layer, pool.index[1], pool.slots(layer).values[:, slots])
        self.values_until = until

    def _named(self, spans: Sequence[SpanRow], until: int) -> None:
        for row in spans:
            self.owner[row.tok_start : row.tok_end] = row.span
        self.keys_until = until

    def _put_keys(self, layer: int, heads: slice, keys: torch.Tensor) -> None:
        """Keys [h, m, D] of whole groups, from `keys_until` on."""
        self._keys.put(layer, heads, self.keys_until, keys)

    def _put_values(self, layer: int, heads: slice, values: torch.Tensor) -> None:
        """Values [h, m, D] from `values_until` on."""
        self._values.put(layer, heads, self.values_until, values)

    # ---------------------------------------------------------------------------------------------------------- reading
    def keys(self, layer: int, heads: slice) -> torch.Tensor:
        """[h, keys_until, D], as far as the bits hold them."""
        return self._keys.get(layer, heads, self.keys_until)

    def values(self, layer: int, heads: slice) -> torch.Tensor:
        """[h, values_until, D]."""
        return self._values.get(layer, heads, self.values_until)

    def slots(self, pool: Pool, layer: int, position: int, held: bool) -> Slots:
        """One layer's entries as a step's attention goes through them: positions 0 to `position` in their order, packed
        ones restored, and behind them the held zone where it is attended. Copies."""
        stored, heads, n = pool.slots(layer), pool.index[1], position + 1
        newest, device = pool.window_slots(self.values_until, n), pool.role.device
        exact = newest[self.keys_until - self.values_until :]
        keys = torch.cat([self.keys(layer, heads), stored.keys[:, exact]], 1)
        values = torch.cat([self.values(layer, heads), stored.values[:, newest]], 1)
        places = torch.arange(n, dtype=torch.int32, device=device)
        span = torch.full((n,), WINDOW, dtype=torch.int32, device=device)
        span[: self.keys_until] = self.owner[: self.keys_until]
        role = torch.where(places < self.keys_until, ROLE["quantised"], ROLE["window"]).to(torch.uint8)
        tables = [table.expand(keys.shape[0], -1) for table in (places, span, role)]
        whole = Slots(keys, values, *tables)
        return whole.beside(pool.held(layer)) if held else whole

    def width(self, layer: int) -> int:
        """Return 0: all layers pack equally many tokens."""
        return 0

    @property
    def saved(self) -> list[tuple[float, float]]:
        """Return, by layer, how many bytes less than exact ones a packed key and a packed value of a KV head take."""
        exact = self.shape.head_token_bytes // 2
        each = [self.form.token_bytes(self.shape.head_dim, layer) for layer in range(self.shape.layers)]
        return [(exact - key, exact - value) for key, value in each]

    # ----------------------------------------------------------------------------------------------------------- errors
    @property
    def _layers(self) -> range:
        return range(self.shape.layers)

    def _off(
        self, layer: int, exact: torch.Tensor, spans: Sequence[SpanRow], read: Read, start: int = 0
    ) -> torch.Tensor:
        """Relative error by span float32 [h, spans] of what `read` gives for a layer: exact [h, m, D] from
        `start` on."""
        restored = read(layer, slice(None))[:, start : start + exact.shape[1]].float()
        parts = []
        for part in (restored - exact.float(), exact.float()):
            sums = F.pad(part.square().sum(-1).cumsum(-1), (1, 0))
            ends, starts = ([getattr(row, field) - start for row in spans] for field in ("tok_end", "tok_start"))
            parts.append(sums[:, ends] - sums[:, starts])
        return (parts[0] / parts[1].clamp(min=1e-20)).clamp(min=0).sqrt()

    def _log_errors(self, spans: Sequence[SpanRow], keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Log the errors by span, of each layer float32 [h, spans]; of values those of the first spans are known."""
        self._log.log_stored(partial(_rows, list(spans), torch.stack(keys), torch.stack(values) if values else None))


def _rows(spans: list[SpanRow], keys: torch.Tensor, values: torch.Tensor | None) -> list[SpanHeadRow]:
    """Return a row of each span, layer and KV head: errors of keys and values [L, H_kv, spans]."""
    of_keys, of_values = keys.tolist(), None if values is None else values.tolist()
    recorded = 0 if values is None else values.shape[-1]
    return [
        SpanHeadRow(
            row.span,
            layer,
            head,
            "quantised",
            None,
            None,
            0,
            of_keys[layer][head][number],
            of_values[layer][head][number] if of_values and number < recorded else None,
        )
        for number, row in enumerate(spans)
        for layer, head in np.ndindex(*keys.shape[:2])
    ]
