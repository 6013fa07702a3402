"""One layer's recall inside a static step, planned: in torch operations, or by the kernel of kernels/zone_plan.py, which equals them.

Shapes: H KV heads, W wishes, S span ids, M cells of P tokens, G query heads of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.zone_plan import zone_plan
from kvlens.memory import FREE, ROLE
from kvlens.static.plan import CellPlan, ZoneTables, fit, plan, reusable

UNLIMITED = torch.iinfo(torch.int64).max
ROLES = [ROLE["resident"], ROLE["reconstructed"], FREE]


@dataclass(frozen=True)
class Names:
    """What a layer's zone is called, written in place. position, span int32, role uint8 [H, M P]: of its slots, as kvlens.memory.hot.Slots;
    is_hot bool [H, S]: spans that lie on the device."""

    position: torch.Tensor
    span: torch.Tensor
    role: torch.Tensor
    is_hot: torch.Tensor


@dataclass(frozen=True)
class Wishes:
    """Of one layer: want int64 [H, W] by priority, below 0: none; read integer [H, G, S] leading tokens or None: all; fire bool [H]: whose
    wishes are carried out; clock int64 0-d, larger at every plan of a KV head; rounds: as kvlens.static.plan.fit; reuse, equal_reuse: as
    kvlens.memory.Selection."""

    want: torch.Tensor
    read: torch.Tensor | None
    fire: torch.Tensor
    clock: torch.Tensor
    rounds: int
    reuse: bool
    equal_reuse: bool


@dataclass(frozen=True)
class Source:
    """Where spans lie in host memory. lengths float32, starts int32 [S]: of spans, in tokens; packed int64 [H, S]: above 0 for those that
    lie as factors, None: all are rows of the pool; page: tokens of a row; origin: position that row 0 begins with; unit_bytes: of a row
    of one KV head."""

    lengths: torch.Tensor
    starts: torch.Tensor
    packed: torch.Tensor | None
    page: int
    origin: int
    unit_bytes: int


@dataclass(frozen=True)
class Moves:
    """What is to be moved. unit int32 [H, M]: into each cell, as kernels/page_moves.py numbers units, -1: nothing; bytes int64 [H]: of
    these; rebuilt bool [H, M]: cells that factors fill; came bool [H, S]: spans whose factors do (None where there are no factors)."""

    unit: torch.Tensor
    bytes: torch.Tensor
    rebuilt: torch.Tensor | None
    came: torch.Tensor | None


def planned_triton(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """As `planned_torch`, in one launch, or two where KV heads reuse alike. It needs no number of rounds."""
    unit, moved, rebuilt, came = zone_plan(
        wishes.want, wishes.read, source.lengths, source.starts, source.packed, wishes.fire, wishes.clock, tables.held, tables.stamp,
        tables.span, tables.offset, tables.live, names.position, names.span, names.role, names.is_hot, source.page, source.origin,
        source.unit_bytes, wishes.reuse, wishes.equal_reuse, ROLES,
    )  # fmt: skip
    return Moves(unit, moved, None, None) if source.packed is None else Moves(unit, moved, rebuilt, came)


def planned_torch(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """Plan what is wished for, and rename: `tables` and `names` say afterwards what lies in the zone once the moves are made."""
    page = source.page
    done = decide(tables, wishes, source)
    raw, rebuilt, came, here = done.fill, None, None, None
    if source.packed is not None:
        packed = source.packed > 0
        here = packed.gather(1, tables.span)
        raw, rebuilt = done.fill & ~here, done.fill & here
        came = torch.zeros_like(packed).scatter(1, torch.where(rebuilt, tables.span, 0), True) & packed
    rename(tables, done, here, names, source)
    row = (source.starts.long()[tables.span] - source.origin) // page + tables.offset
    heads = len(row)
    unit = torch.where(raw, row * heads + torch.arange(heads, device=row.device)[:, None], -1).int()
    moved = done.moved if source.packed is None else raw.sum(1)
    return Moves(unit, moved * source.unit_bytes, rebuilt, came)


def decide(tables: ZoneTables, wishes: Wishes, source: Source) -> CellPlan:
    """The plan alone: `tables` are written, nothing is renamed."""
    want, fire = wishes.want, wishes.fire
    tokens = source.lengths.long()[want.clamp(min=0)]
    if wishes.read is not None:
        tokens = wishes.read.amax(1).gather(1, want.clamp(min=0))
    count = torch.where((want >= 0) & fire[:, None], tokens // source.page, 0)
    accepted = fit(count, tables.live.shape[1], wishes.rounds)
    keep = None
    if not wishes.reuse:
        keep = torch.zeros(1, 1, dtype=torch.long, device=want.device)
    elif wishes.equal_reuse:
        there = reusable(tables, want, count, accepted).sum(1)
        keep = torch.where(fire, there, UNLIMITED).min().view(1, 1)
    return plan(tables, want, count, accepted, wishes.clock, keep)


def rename(tables: ZoneTables, done: CellPlan, rebuilt: torch.Tensor | None, names: Names, source: Source) -> None:
    """The zone's slots take the names of what lies in them now. rebuilt bool [H, M]: cells whose spans lie as factors."""
    page = source.page
    first = source.starts.long()[tables.span] + tables.offset * page
    at = (first[..., None] + torch.arange(page, device=first.device)).flatten(1)
    new, live, spans = (x.repeat_interleave(page, 1) if page > 1 else x for x in (done.fill, tables.live, tables.span))
    names.position.copy_(torch.where(new, at, names.position))
    names.span.copy_(torch.where(new, spans, names.span))
    named = torch.where(live, ROLE["resident"], FREE)
    if rebuilt is not None:
        factored = rebuilt.repeat_interleave(page, 1) if page > 1 else rebuilt
        named = torch.where(live & factored, ROLE["reconstructed"], named)
    names.role.copy_(named)
    names.is_hot.copy_((names.is_hot & ~done.gone) | (tables.held > 0))
