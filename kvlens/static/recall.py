"""Recall inside a static step: plan on the device, move the missing rows, rename their slots, count. Host code only picks the layer."""

from __future__ import annotations

import torch

from kvlens.memory import FREE, ROLE, Memory, Selection
from kvlens.rows import SpanRow
from kvlens.static import cuda
from kvlens.static.plan import CellPlan, ZoneTables, fit, plan, reusable, rounds_for
from kvlens.static.rows import HostRows

UNLIMITED = torch.iinfo(torch.int64).max


class StaticRecall:
    """The recall zones of a run. `moved` int64 [2, L, H_kv]: bytes moved since the session began, before an attention that waited for
    them and after it, exactly. `bytes`: of the tables it keeps on the device.
    """

    def __init__(self, memory: Memory, rows: HostRows) -> None:
        self.memory, self.rows = memory, rows
        shape, device, spans = memory.shape, memory.device, memory.spans.capacity
        self.tables: dict[int, ZoneTables] = {}
        for layer in range(shape.layers):
            cells = memory.layout.of(layer).recall // rows.page
            if cells:
                # storages of their own: a compiled function may not write to inputs that lie in one
                sizes = (spans, spans, cells, cells)
                held, stamp, span, offset = (torch.zeros(shape.kv_heads, size, dtype=torch.long, device=device) for size in sizes)
                self.tables[layer] = ZoneTables(held, stamp, span, offset, torch.zeros_like(span, dtype=torch.bool))
        self.moved = torch.zeros(2, shape.layers, shape.kv_heads, dtype=torch.long, device=device)
        self.decide, self.rename = decide, rename

    def _rounds(self, cells: int) -> int:
        """Rounds that fitting wishes into `cells` takes at most. Known before the first step: a captured step cannot take one more."""
        page = self.rows.page
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
            if row.state in ("cold", "coarse"):
                assert limits[0] <= tokens <= limits[1], f"a span of {tokens} tokens, where the layout says {limits}"

    @property
    def bytes(self) -> int:
        tables = [x for t in self.tables.values() for x in (t.held, t.stamp, t.span, t.offset, t.live)]
        factors = self.rows.factors.bytes if self.rows.factors is not None else 0
        return factors + sum(x.numel() * x.element_size() for x in (*tables, self.moved))

    def bring(self, layer: int, selection: Selection, fire: torch.Tensor, clock: torch.Tensor, later: bool) -> torch.Tensor | None:
        """The wishes of the KV heads in `fire` bool [H_kv], as far as they fit. clock int64 0-d: the step's position. -> bytes moved
        [H_kv]; None where the layer has no recall zone or nobody can wish."""
        tables, want = self.tables.get(layer), selection.want
        if tables is None or want.shape[1] == 0:
            return None
        memory, page = self.memory, self.rows.page
        rounds = 1 if selection.fits else self._rounds(tables.live.shape[1])
        done = self.decide(
            tables, want, selection.tokens, memory.spans.lengths, fire, clock, page, rounds, selection.reuse, selection.equal_reuse
        )
        token_bytes, factors = memory.shape.head_token_bytes, self.rows.factors
        if factors is None:
            self._move(layer, tables, done.fill)
            self._rename(layer, tables, done, None)
            moved = done.moved * page * token_bytes
        else:
            assert selection.tokens is None, "part of a span can be fetched only where it lies raw"
            assert selection.reuse
            assert not selection.equal_reuse
            at = self.rows.at(layer)
            packed = factors.holds(at)
            here = packed.gather(1, tables.span)
            came = torch.zeros_like(packed).scatter(1, torch.where(done.fill & here, tables.span, 0), True) & packed
            raw = done.fill & ~here
            self._move(layer, tables, raw)
            factors.bring(at, layer, came, tables.span, tables.offset, done.fill & here, *self._cells(layer))
            self._rename(layer, tables, done, here)
            size = memory.dtype.itemsize
            moved = raw.sum(1) * token_bytes + torch.where(came, factors.sizes(at), 0).sum(1) * size
        self.moved[int(later), layer].add_(moved)
        return moved

    def _zone(self, layer: int) -> slice:
        start = self.memory.hot.pool(layer).start["recall"]
        return slice(start, start + self.memory.layout.of(layer).recall)

    def _cells(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the zone, [H_kv, tokens, D]."""
        slots, zone = self.memory.hot.slots(layer), self._zone(layer)
        return slots.keys[:, zone], slots.values[:, zone]

    def _move(self, layer: int, tables: ZoneTables, fill: torch.Tensor) -> None:
        page = self.rows.page
        row = (self.memory.spans.starts.long()[tables.span] - self.rows.origin) // page + tables.offset
        keys, values = (x.unflatten(1, (-1, page)) for x in self._cells(layer))
        move = cuda.fetch if keys.is_cuda else fetch
        move(self.rows.layer(layer), torch.where(fill, row, 0), fill, keys, values)

    def _rename(self, layer: int, tables: ZoneTables, done: CellPlan, rebuilt: torch.Tensor | None) -> None:
        memory, zone = self.memory, self._zone(layer)
        slots = memory.hot.slots(layer)
        named = slots.position[:, zone], slots.span[:, zone], slots.role[:, zone]
        self.rename(tables, done, rebuilt, *named, memory.spans.starts, memory.is_hot[layer], self.rows.page)


def decide(
    tables: ZoneTables, want: torch.Tensor, read: torch.Tensor | None, lengths: torch.Tensor, fire: torch.Tensor, clock: torch.Tensor,
    page: int, rounds: int, reuse: bool, equal_reuse: bool,
) -> CellPlan:  # fmt: skip
    """What one layer's recall does, as `StaticRecall.bring` is told: want [H_kv, W], read [H_kv, G, S] leading tokens or None, lengths
    [S], fire [H_kv]. Tensors only, so that it can be compiled apart, once for all layers."""
    tokens = lengths.long()[want.clamp(min=0)]
    if read is not None:
        tokens = read.amax(1).gather(1, want.clamp(min=0))
    count = torch.where((want >= 0) & fire[:, None], tokens // page, 0)
    accepted = fit(count, tables.live.shape[1], rounds)
    keep = None
    if not reuse:
        keep = torch.zeros(1, 1, dtype=torch.long, device=want.device)
    elif equal_reuse:
        there = reusable(tables, want, count, accepted).sum(1)
        keep = torch.where(fire, there, UNLIMITED).min().view(1, 1)
    return plan(tables, want, count, accepted, clock, keep)


def rename(
    tables: ZoneTables, done: CellPlan, rebuilt: torch.Tensor | None, position: torch.Tensor, span: torch.Tensor, role: torch.Tensor,
    starts: torch.Tensor, is_hot: torch.Tensor, page: int,
) -> None:  # fmt: skip
    """The zone's slots take the names of what lies in them now. position, span, role [H_kv, cells * page]; rebuilt bool [H_kv, cells]:
    cells whose spans lie as factors. Tensors only, as `decide`."""
    first = starts.long()[tables.span] + tables.offset * page
    at = (first[..., None] + torch.arange(page, device=starts.device)).flatten(1)
    new, live, spans = (x.repeat_interleave(page, 1) if page > 1 else x for x in (done.fill, tables.live, tables.span))
    position.copy_(torch.where(new, at, position))
    span.copy_(torch.where(new, spans, span))
    named = torch.where(live, ROLE["resident"], FREE)
    if rebuilt is not None:
        named = torch.where(live & rebuilt, ROLE["reconstructed"], named)
    role.copy_(named)
    is_hot.copy_((is_hot & ~done.gone) | (tables.held > 0))


def fetch(pool: torch.Tensor, row: torch.Tensor, fill: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """pool [rows, H_kv, 2, P, D], row int64 [H_kv, M] into cells keys, values [H_kv, M, P, D] where `fill` [H_kv, M]. A plain gather that
    reads a row for every cell: fixed shapes, whatever is missing."""
    found = pool[row, torch.arange(row.shape[0], device=row.device)[:, None]]
    new = fill[:, :, None, None]
    keys.copy_(torch.where(new, found[:, :, 0], keys))
    values.copy_(torch.where(new, found[:, :, 1], values))
