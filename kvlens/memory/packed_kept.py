"""The packed kept zone: prompt tokens that a method keeps, in few bits from the end of prefill on. Each KV head keeps
its own tokens; the window behind them stays exact.

The kept tokens of a layer's KV heads follow one another; keys of each KV head fill whole groups, the last one with
copies of its last token. Shapes: L layers, H_kv KV heads, h of a pool, K kept tokens of the KV head that keeps most, D
head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kvlens.kernels.group_sums import sum_by_group
from kvlens.memory.evictions import token_names
from kvlens.memory.hot_tier import Pool
from kvlens.memory.layout import Quantised
from kvlens.memory.log import MemoryLog
from kvlens.memory.packed_codes import open_codes
from kvlens.memory.placement import Placement
from kvlens.memory.slots import FREE, PromptStore, Slots
from kvlens.rows import SpanHeadRow
from kvlens.shape import KVShape

EVERY = slice(None)


class PackedKept:
    """Owns the codes of kept tokens (kvlens/memory/packed_codes.py), and which token of which span each is."""

    def __init__(
        self, shape: KVShape, form: Quantised, dtype: torch.dtype, device: torch.device, log: MemoryLog
    ) -> None:
        self.shape, self.form, self.dtype, self._log = shape, form, dtype, log
        self._keys, self._values, self._shared = open_codes(shape, form, 1, dtype, device)
        self._tables: list[torch.Tensor] = []
        """by layer int32 [4, H_kv, K]: position (-1: no token), span, and places among packed keys and values"""
        self._roles: list[torch.Tensor] = []
        for layer in range(shape.layers):
            size = shape.kv_heads, max(form.kept_counts[layer])
            self._tables.append(torch.zeros(4, *size, dtype=torch.int32, device=device))
            self._roles.append(torch.full(size, FREE, dtype=torch.uint8, device=device))
        self.values_until = 0
        """positions below it have packed values"""
        self.is_ragged = any(len(set(counts)) > 1 for counts in form.kept_counts)
        """some slots hold no token"""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *self._keys.tensors(), *self._values.tensors(), *self._shared, *self._tables, *self._roles

    def width(self, layer: int) -> int:
        """Return the slots of a layer's packed tokens."""
        return self._tables[layer].shape[2]

    @property
    def saved(self) -> list[tuple[float, float]]:
        """Return, by layer, how many bytes less than exact ones a packed key and a packed value of a KV head take."""
        exact = self.shape.head_token_bytes // 2
        each = [self.form.token_bytes(self.shape.head_dim, layer) for layer in range(self.shape.layers)]
        return [(exact - key, exact - value) for key, value in each]

    # ---------------------------------------------------------------------------------------------------------- writing
    def place(self, placement: Placement, prompt: PromptStore, ids: list[int]) -> None:
        """Pack the tokens that the placement keeps."""
        self.values_until = prompt.tokens
        errors = []
        for layer in range(self.shape.layers):
            retained = placement.kept.select(slice(layer, layer + 1), EVERY)[0].expand(self.shape.kv_heads, -1)
            missing = self._tables[layer].shape[2] - retained.shape[1]
            retained = F.pad(retained, (0, missing), value=-1) if missing > 0 else retained
            self.is_ragged |= bool((retained < 0).any())
            span, role = token_names(placement, retained.contiguous(), ids)
            keys = self._put(layer, retained, prompt.keys[layer], prompt.values[layer])
            width = self._tables[layer].shape[2]
            self._tables[layer][0], self._tables[layer][1] = retained[:, :width], span[:, :width]
            self._roles[layer].copy_(role[:, :width])
            errors.append(self._errors(layer, keys, placement, ids))
        self._log.log_stored(partial(list, [row for rows in errors for row in rows]))

    def _put(self, layer: int, retained: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Pack one layer: retained [H_kv, m] positions, -1 behind a KV head's last. Return the exact keys and values
        [H_kv, K, D]."""
        width, group, size = self._tables[layer].shape[2], self.form.group, keys.shape[-1]
        positions = retained[:, :width]
        counts = (positions >= 0).sum(1).tolist()
        index = positions.clamp(min=0)[..., None].expand(-1, -1, size)
        exact = [states.gather(1, index) for states in (keys, values)]
        key_at = value_at = 0
        for head, count in enumerate(counts):
            if not count:
                continue
            filled = exact[0][head, :count]
            short = -count % group
            whole = torch.cat([filled, filled[-1:].expand(short, -1)]) if short else filled
            self._keys.put(layer, EVERY, key_at, whole[None])
            self._values.put(layer, EVERY, value_at, exact[1][head, None, :count])
            places = torch.arange(width, dtype=torch.int32, device=keys.device).clamp(max=count - 1)
            self._tables[layer][2, head], self._tables[layer][3, head] = places + key_at, places + value_at
            key_at, value_at = key_at + len(whole), value_at + count
        return exact

    def values_to(self, pools: Sequence[Pool], until: int) -> None:
        """Do nothing: what is decoded stays exact."""

    # ---------------------------------------------------------------------------------------------------------- reading
    def _restored(self, layer: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [h, K, D] of a layer's kept tokens, as far as the bits hold them."""
        tables = self._tables[layer][:, heads].long()
        if not tables.shape[2]:
            empty = torch.zeros(*tables.shape[1:], self.shape.head_dim, dtype=self.dtype, device=tables.device)
            return empty, empty
        key_rows, value_rows = self.form.rows(layer, self.shape.kv_heads)
        return self._keys.get(layer, EVERY, key_rows)[0][tables[2]], self._values.get(layer, EVERY, value_rows)[0][
            tables[3]
        ]

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

    # ----------------------------------------------------------------------------------------------------------- errors
    def _errors(self, layer: int, exact: list[torch.Tensor], placement: Placement, ids: list[int]) -> list[SpanHeadRow]:
        """Return relative errors of kept keys and values by span and KV head."""
        positions = self._tables[layer][0]
        starts = torch.tensor([span.tok_start for span in placement.spans], device=positions.device)
        owner = (torch.searchsorted(starts, positions.clamp(min=0).contiguous(), right=True) - 1).clamp(min=0)
        number, live = len(placement.spans), (positions >= 0).double()
        errors = []
        for restored, original in zip(self._restored(layer, EVERY), exact, strict=True):
            sums = []
            for part in (restored.double() - original.double(), original.double()):
                sums.append(sum_by_group(part.square().sum(-1) * live, owner, max(number, 1)))
            errors.append((sums[0] / sums[1].clamp(min=1e-20)).sqrt().tolist())
        counts = F.one_hot(owner, max(number, 1)).mul(live[..., None].long()).sum(1).tolist()
        return [
            SpanHeadRow(
                ids[span], layer, head, "quantised", None, None, 0, errors[0][head][span], errors[1][head][span]
            )
            for span in range(number)
            for head in range(len(positions))
            if counts[head][span]
        ]
