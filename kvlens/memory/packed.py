"""Tokens that stay on the device in few bits.

The packed zone holds what leaves the window: the same positions in every KV head, from 0 on without a gap. Keys are
packed as whole groups leave the window; values one by one, so that the newest `residual` stay exact. Packed kept tokens
are prompt tokens that each KV head chose for itself; keys of each KV head fill whole groups, the last one with copies
of its last token. Shapes: L layers, H_kv KV heads, h of a pool, m tokens, K kept tokens of the KV head that keeps most,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kvlens.memory.log import MemoryLog
from kvlens.memory.placement import Placement
from kvlens.quantised.codes import open_codes
from kvlens.quantised.errors import error_row, error_rows, owner_errors, range_errors
from kvlens.quantised.form import Quantised, Turn
from kvlens.quantised.stored import Codes, with_newest
from kvlens.rows import SpanHeadRow, SpanRow
from kvlens.shape import KVShape
from kvlens.tiers.hot import Pool
from kvlens.tiers.slots import FREE, ROLE, WINDOW, PromptStore, Slots

EVERY = slice(None)


class PackedTokens:
    """Owns the codes of all layers."""

    is_ragged = False
    """True: some slots hold no token"""

    def __init__(
        self, shape: KVShape, form: Quantised, prompt: PromptStore, log: MemoryLog, turn: Turn | None = None
    ) -> None:
        self.shape, self.form, self.dtype, self._log = shape, form, prompt.keys.dtype, log
        self._keys, self._values, self._shared = open_codes(shape, form, self.dtype, prompt.keys.device, turn)
        self.values_until = 0
        """positions below it have packed values"""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors."""
        return *self._keys.tensors(), *self._values.tensors(), *self._shared

    def width(self, layer: int) -> int:
        """Return the slots that a layer's packed tokens take beyond those of the window: 0 if all layers pack equally
        many tokens."""
        return 0

    def values_to(self, pools: Sequence[Pool], until: int) -> None:
        """Pack the values of positions below `until`, where decoded tokens are packed."""


class PackedZone(PackedTokens):
    """Owns which span each packed position belongs to."""

    def __init__(
        self, shape: KVShape, form: Quantised, prompt: PromptStore, log: MemoryLog, turn: Turn | None = None
    ) -> None:
        super().__init__(shape, form, prompt, log, turn)
        self.owner = torch.zeros(form.key_groups * form.group, dtype=torch.int32, device=prompt.keys.device)
        self.keys_until = 0
        """positions below it have packed keys"""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *super().tensors(), self.owner

    def place(self, pools: Sequence[Pool], spans: Sequence[SpanRow], prompt: PromptStore, until: int) -> None:
        """The prompt: keys below `until`, values but for the newest `residual`, which go to the rings beside the
        window's keys. spans: of the positions below `until`."""
        exact = until if self.form.packs_prompt_alone else max(prompt.tokens - self.form.residual, 0)
        for pool in pools:
            slots = pool.window_slots(exact, until)
            pool.values[:, :, slots] = prompt.values[pool.index][:, :, exact:until]
            for layer in pool.layers:
                self._keys.put(layer, pool.index[1], self.keys_until, prompt.keys[layer, pool.index[1], :until])
                self._values.put(layer, pool.index[1], self.values_until, prompt.values[layer, pool.index[1], :exact])
        self.values_until = exact
        self._named(spans, until)
        if spans:
            keys = self._errors(self._keys, until, prompt.keys[:, :, :until], spans)
            whole = [row for row in spans if row.tok_end <= exact]
            values = self._errors(self._values, exact, prompt.values[:, :, :exact], whole)
            self._log.log_stored(partial(error_rows, [row.span for row in spans], keys, values))

    def leave(self, pools: Sequence[Pool], spans: Sequence[SpanRow], start: int, end: int) -> None:
        """Keys of positions [start, end) leave the rings; their values follow one by one. spans: of these positions."""
        assert start == self.keys_until, (start, self.keys_until)
        exact = torch.empty(self.shape.layers, self.shape.kv_heads, end - start, self.shape.head_dim)
        exact = exact.to(self.owner.device)
        for pool in pools:
            exact[pool.index] = pool.keys[:, :, pool.window_slots(start, end)].float()
            for layer in pool.layers:
                self._keys.put(layer, pool.index[1], start, exact[layer, pool.index[1]].to(self.dtype))
        self._named(spans, end)
        errors = self._errors(self._keys, end, exact, spans, start)
        self._log.log_stored(partial(error_rows, [row.span for row in spans], errors, None))

    def values_to(self, pools: Sequence[Pool], until: int) -> None:
        if until <= self.values_until or self.form.packs_prompt_alone:
            return
        for pool in pools:
            slots = pool.window_slots(self.values_until, until)
            for layer in pool.layers:
                self._values.put(layer, pool.index[1], self.values_until, pool.slots(layer).values[:, slots])
        self.values_until = until

    def _named(self, spans: Sequence[SpanRow], until: int) -> None:
        for row in spans:
            self.owner[row.tok_start : row.tok_end] = row.span
        self.keys_until = until

    def slots(self, pool: Pool, layer: int, position: int, held: bool) -> Slots:
        """One layer's entries as a step's attention goes through them: positions 0 to `position` in their order, packed
        ones restored, and behind them the held zone where it is attended. Copies."""
        stored, heads, n = pool.slots(layer), pool.index[1], position + 1
        newest, device = pool.window_slots(self.values_until, n), pool.role.device
        exact = newest[self.keys_until - self.values_until :]
        keys = with_newest(self._keys, layer, heads, self.keys_until, stored.keys[:, exact])
        values = with_newest(self._values, layer, heads, self.values_until, stored.values[:, newest])
        places = torch.arange(n, dtype=torch.int32, device=device)
        span = torch.full((n,), WINDOW, dtype=torch.int32, device=device)
        span[: self.keys_until] = self.owner[: self.keys_until]
        role = torch.where(places < self.keys_until, ROLE["quantised"], ROLE["window"]).to(torch.uint8)
        tables = [table.expand(keys.shape[0], -1) for table in (places, span, role)]
        whole = Slots(keys, values, *tables)
        return whole.beside(pool.held(layer)) if held else whole

    def overlay(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a layer's prompt keys and values [H_kv, n, D], packed tokens as the bits hold them."""
        keys, values = keys.clone(), values.clone()
        keys[:, : self.keys_until] = self._keys.get(layer, EVERY, self.keys_until)
        values[:, : self.values_until] = self._values.get(layer, EVERY, self.values_until)
        return keys, values

    def _errors(
        self, codes: Codes, until: int, exact: torch.Tensor, spans: Sequence[SpanRow], start: int = 0
    ) -> torch.Tensor:
        """Return the errors by span float32 [L, H_kv, spans] of the codes below `until`; exact [L, H_kv, m, D] from
        `start` on."""
        ranges = [(row.tok_start - start, row.tok_end - start) for row in spans]
        restored = (codes.get(layer, EVERY, until)[:, start : start + exact.shape[2]] for layer in range(len(exact)))
        return torch.stack([range_errors(*pair, ranges) for pair in zip(restored, exact, strict=True)])


class PackedKept(PackedTokens):
    """Owns which token of which span each kept token is."""

    def __init__(
        self, shape: KVShape, form: Quantised, prompt: PromptStore, log: MemoryLog, turn: Turn | None = None
    ) -> None:
        super().__init__(shape, form, prompt, log, turn)
        self._tables: list[torch.Tensor] = []
        """by layer int32 [4, H_kv, K]: position (-1: no token), span, and places among packed keys and values"""
        self._roles: list[torch.Tensor] = []
        for layer in range(shape.layers):
            size = shape.kv_heads, max(form.kept_counts[layer])
            self._tables.append(torch.zeros(4, *size, dtype=torch.int32, device=prompt.keys.device))
            self._roles.append(torch.full(size, FREE, dtype=torch.uint8, device=prompt.keys.device))
        self.is_ragged = any(len(set(counts)) > 1 for counts in form.kept_counts)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *super().tensors(), *self._tables, *self._roles

    def width(self, layer: int) -> int:
        """Return the slots of a layer's packed tokens."""
        return self._tables[layer].shape[2]

    def place(self, placement: Placement, prompt: PromptStore, ids: list[int]) -> None:
        """Pack the tokens that the placement keeps."""
        self.values_until = prompt.tokens
        errors = []
        for layer in range(self.shape.layers):
            retained = placement.kept.select(slice(layer, layer + 1), EVERY)[0].expand(self.shape.kv_heads, -1)
            missing = self._tables[layer].shape[2] - retained.shape[1]
            retained = F.pad(retained, (0, missing), value=-1) if missing > 0 else retained
            self.is_ragged |= bool((retained < 0).any())
            span, role = placement.name_tokens(retained, ids)
            keys, width = self._put(layer, retained, prompt.keys[layer], prompt.values[layer]), self.width(layer)
            self._tables[layer][0], self._tables[layer][1] = retained[:, :width], span[:, :width]
            self._roles[layer].copy_(role[:, :width])
            errors.append(self._errors(layer, keys, placement, ids))
        self._log.log_stored(partial(list, [row for rows in errors for row in rows]))

    def _put(self, layer: int, retained: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Pack one layer: retained [H_kv, m] positions, -1 behind a KV head's last. Return the exact keys and values
        [H_kv, K, D]."""
        width, group = self._tables[layer].shape[2], self.form.group
        counts = (retained[:, :width] >= 0).sum(1).tolist()
        index = retained[:, :width].clamp(min=0)[..., None].expand(-1, -1, keys.shape[-1])
        exact = [states.gather(1, index) for states in (keys, values)]
        for head, count in enumerate(counts):
            if not count:
                continue
            filled, only = exact[0][head, :count], slice(head, head + 1)
            self._keys.put(layer, only, 0, torch.cat([filled, filled[-1:].expand(-count % group, -1)])[None])
            self._values.put(layer, only, 0, exact[1][head, None, :count])
            self._tables[layer][2:, head] = torch.arange(width, device=keys.device).clamp(max=count - 1).int()
        return exact

    def _restored(self, layer: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [h, K, D] of a layer's kept tokens, as far as the bits hold them."""
        tables = self._tables[layer][:, heads].long()
        if not tables.shape[2]:
            empty = torch.zeros(*tables.shape[1:], self.shape.head_dim, dtype=self.dtype, device=tables.device)
            return empty, empty
        rows = [count // self.shape.kv_heads for count in self.form.rows(layer, self.shape.kv_heads)]
        stored = self._keys.get(layer, heads, rows[0]), self._values.get(layer, heads, rows[1])
        index = tables[2, ..., None].expand(-1, -1, self.shape.head_dim)
        return stored[0].gather(1, index), stored[1].gather(1, index)

    def overlay(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions, coded = self._tables[layer][0].long(), self._restored(layer, EVERY)
        keys, values = keys.clone(), values.clone()
        for head, places in enumerate(positions):
            keys[head, places[places >= 0]] = coded[0][head, places >= 0]
            values[head, places[places >= 0]] = coded[1][head, places >= 0]
        return keys, values

    def slots(self, pool: Pool, layer: int, position: int, held: bool) -> Slots:
        """One layer's entries as a step's attention goes through them: kept tokens, restored, then the window up to
        `position`, and behind it the held zone where it is attended. Copies."""
        heads = pool.index[1]
        keys, values = self._restored(layer, heads)
        places, span = self._tables[layer][0, heads], self._tables[layer][1, heads]
        packed = Slots(keys, values, places, span, self._roles[layer][heads])
        window = pool.slots(layer, pool.start["window"] + min(pool.zones.window, position - pool.window_origin + 1))
        whole = packed.beside(window)
        return whole.beside(pool.held(layer)) if held else whole

    def _errors(self, layer: int, exact: list[torch.Tensor], placement: Placement, ids: list[int]) -> list[SpanHeadRow]:
        """Return relative errors of kept keys and values by span and KV head."""
        positions = self._tables[layer][0]
        starts = torch.tensor([span.tok_start for span in placement.spans], device=positions.device)
        owner = (torch.searchsorted(starts, positions.clamp(min=0).contiguous(), right=True) - 1).clamp(min=0)
        number, live = len(placement.spans), (positions >= 0).double()
        pairs = zip(self._restored(layer, EVERY), exact, strict=True)
        keys, values = (owner_errors(*pair, owner, live, max(number, 1)) for pair in pairs)
        counts = F.one_hot(owner, max(number, 1)).mul(live[..., None].long()).sum(1).tolist()
        return [
            error_row(ids[span], layer, head, keys[head][span], values[head][span])
            for span in range(number)
            for head in range(len(positions))
            if counts[head][span]
        ]
