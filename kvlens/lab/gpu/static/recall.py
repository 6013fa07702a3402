"""Recall inside a static step: plan on the device, move the missing rows, count. Host code only picks the layer."""

from __future__ import annotations

import torch

from kvlens.kernels.choice import Backend, backend
from kvlens.kernels.zone_tables import Names, Source, Wishes, ZoneTables
from kvlens.kernels.zone_torch import rounds_for, zone_plan_torch
from kvlens.lab.gpu.kernels.zone_plan import zone_plan_triton
from kvlens.lab.gpu.static import cuda
from kvlens.lab.gpu.static.factors import FactorRows
from kvlens.memory.memory import Memory
from kvlens.memory.placement import Selection
from kvlens.methods.hooks import FactorForm
from kvlens.rows import SpanRow
from kvlens.tiers.cold import Pools
from kvlens.tiers.slots import FREE, ROLE

COLD = ("cold", "coarse")
"""states in which spans that go to host memory are born"""
ROLES = (ROLE["resident"], ROLE["reconstructed"], FREE)


class StaticRecall:
    """The recall zones of a run. `moved` int64 [2, L, H_kv]: bytes moved since the session began, before an attention
    that waited for them and after it, exactly. `bytes`: of the tables it keeps on the device. `kernels`: what plans,
    and puts factors' tokens into cells.
    """

    def __init__(
        self, memory: Memory, form: FactorForm | None = None, kernels: Backend | None = None, host: Pools | None = None
    ) -> None:
        """form: of units that are not raw; kernels: None: the kernel on CUDA, torch operations elsewhere; host: gives
        host memory for a cold tier in which nothing lies yet.

        Raises Shortage where there is not enough to pin.
        """
        self.memory, self.cold = memory, memory.host.cold
        self.kernels: Backend = kernels or backend(memory.spans.is_hot)
        shape, device, spans = memory.shape, memory.device, memory.spans.capacity
        self.tables: dict[int, ZoneTables] = {}
        for layer in range(shape.layers):
            cells = memory.layout.zones_of(layer).recall // self.cold.page
            if cells:
                self.tables[layer] = ZoneTables.empty(shape.kv_heads, spans, cells, device)
        self.moved = torch.zeros(2, shape.layers, shape.kv_heads, dtype=torch.long, device=device)
        self.factors = self._reserve(form, host)
        if self.factors is not None:
            self.factors.use(self.kernels)
        self.move = cuda.fetch if memory.spans.is_hot.is_cuda else fetch
        """puts units of the cold tier into cells"""
        self.plan = zone_plan_triton if self.kernels == "triton" else zone_plan_torch

    def _reserve(self, form: FactorForm | None, host: Pools | None) -> FactorRows | None:
        """A captured step cannot follow the cold tier to other memory, so all that the run may put there is taken
        now."""
        memory, cold = self.memory, self.cold
        if not self.tables and not cold.bytes:
            return None
        raw = [row.tok_start for row in memory.spans.rows if form is None and row.state in COLD]
        cold.reserve(min(raw, default=memory.hot.oldest), host)
        if form is None or not self.tables:
            return None
        cold.reserve_packed(0, memory.hot.oldest, host)
        return FactorRows(memory, form)

    def _rounds(self, cells: int) -> int:
        """Rounds that fitting wishes into `cells` takes at most. Known before the first step: a captured step cannot
        take one more."""
        page = self.cold.page
        if page > 1:
            return rounds_for(1, 1)
        shortest, longest = self.memory.layout.recall_spans or (1, cells)
        return rounds_for(max(1, shortest), max(1, min(longest, cells)))

    def check(self, spans: list[SpanRow]) -> None:
        """Spans that a method opened between steps are as long as its layout said."""
        limits = self.memory.layout.recall_spans
        if limits is None:
            return
        for row in spans:
            tokens = row.tok_end - row.tok_start
            if row.state in COLD:
                assert limits[0] <= tokens <= limits[1], f"a span of {tokens} tokens, where the layout says {limits}"

    def publish(self) -> None:
        """What went to the cold tier since the last call can be recalled by the next step."""
        if self.factors is not None:
            self.factors.publish()

    @property
    def bytes(self) -> int:
        tables = [x for t in self.tables.values() for x in t.tensors()]
        factors = self.factors.bytes if self.factors is not None else 0
        return factors + sum(x.numel() * x.element_size() for x in (*tables, self.moved))

    def bring(
        self, layer: int, selection: Selection, fire: torch.Tensor, clock: torch.Tensor, later: bool
    ) -> torch.Tensor | None:
        """The wishes of the KV heads in `fire` bool [H_kv], as far as they fit. clock int64 0-d: the step's position.
        -> bytes moved [H_kv]; None where the layer has no recall zone or nobody can wish."""
        tables, requested = self.tables.get(layer), selection.requested
        if tables is None or requested.shape[1] == 0:
            return None
        memory, cold, factors = self.memory, self.cold, self.factors
        rounds = 1 if selection.fits else self._rounds(tables.live.shape[1])
        wishes = Wishes(requested, selection.tokens, fire, clock, rounds, selection.reuse, selection.equal_reuse)
        packed = None if factors is None else factors.tokens_of(cold.place[layer])
        spans, unit_bytes = memory.spans, cold.page * memory.shape.head_token_bytes
        source = Source(spans.lengths, spans.starts, packed, cold.page, cold.origin, unit_bytes)
        moves = self.plan(tables, self._names(layer), wishes, source)
        self._move(layer, moves.unit, later)
        moved = moves.bytes
        if factors is not None:
            assert selection.tokens is None, "part of a span can be fetched only where it lies raw"
            assert selection.reuse
            assert not selection.equal_reuse
            assert moves.came is not None
            assert moves.rebuilt is not None
            row = cold.place[layer]
            moved = moved + factors.bring(
                row, layer, moves.came, tables.span, tables.offset, moves.rebuilt, *self._cells(layer)
            )
        self.moved[int(later), layer].add_(moved)
        return moved

    def _zone(self, layer: int) -> slice:
        start = self.memory.hot.pool(layer).start["recall"]
        return slice(start, start + self.memory.layout.zones_of(layer).recall)

    def _cells(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the zone, [H_kv, tokens, D]."""
        slots, zone = self.memory.hot.slots(layer), self._zone(layer)
        return slots.keys[:, zone], slots.values[:, zone]

    def _move(self, layer: int, unit: torch.Tensor, later: bool) -> None:
        page = self.cold.page
        keys, values = (x.unflatten(1, (-1, page)) for x in self._cells(layer))
        self.move(self.cold.layer(layer), unit, keys, values, later)

    def _names(self, layer: int) -> Names:
        slots, zone = self.memory.hot.slots(layer), self._zone(layer)
        return Names(
            slots.position[:, zone], slots.span[:, zone], slots.role[:, zone], self.memory.spans.is_hot[layer], ROLES
        )


def fetch(pool: torch.Tensor, unit: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, later: bool) -> None:
    """pool [rows, H_kv, 2, P, D], unit int32 [H_kv, M] (row H_kv + head, -1: none) into cells keys, values [H_kv, M, P,
    D]; later: this step's attention does not wait for them. A plain gather that reads a unit for every cell: fixed
    shapes, whatever is missing."""
    fetched = pool.flatten(0, 1)[unit.clamp(min=0)]
    new = (unit >= 0)[:, :, None, None]
    keys.copy_(torch.where(new, fetched[:, :, 0], keys))
    values.copy_(torch.where(new, fetched[:, :, 1], values))
