"""The reference of kernels/zone_plan.py: the recall of one layer's static step planned in torch operations of fixed
shape. It decides what kvlens.memory.recall.RecallZone decides on the host.

Counted in cells: a cell is a token, or a page where all spans are pages of one size. Of a span the zone holds the
leading cells. Shapes: H KV heads of one layer, S span ids, W wishes, M cells of P tokens, G query heads of a KV head.
Span id 0 is the window's: it is never wished for, so its column of the tables takes what belongs to no wish.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class ZoneTables:
    """What the zones of one layer hold, written in place by a plan.

    held int64 [H, S]: cells of each span; stamp int64 [H, S]: larger for spans wished for more recently; span, offset
    int64 [H, M]: what lies in each cell, where `live` bool [H, M].
    """

    held: torch.Tensor
    stamp: torch.Tensor
    span: torch.Tensor
    offset: torch.Tensor
    live: torch.Tensor


@dataclass(frozen=True)
class Names:
    """What a layer's zone is called, written in place. position, span int32, role uint8 [H, M P]: of its slots, rows of
    equal stride; is_hot bool [H, S]: spans that lie on the device. roles: codes of a slot that holds a raw span, a
    reconstructed one, nothing."""

    position: torch.Tensor
    span: torch.Tensor
    role: torch.Tensor
    is_hot: torch.Tensor
    roles: tuple[int, int, int]


@dataclass(frozen=True)
class Wishes:
    """Of one layer: requested int64 [H, W], highest priority first, no span twice, below 0: none; read integer [H, G,
    S]: leading tokens that are read, None: all; fire bool [H]: whose wishes are carried out; clock int64 0-d, larger at
    every plan of a KV head; rounds: as `fit`; reuse: False: what is there is moved again all the same; equal_reuse:
    every KV head that fires reuses as many cells as the one that can reuse fewest."""

    requested: torch.Tensor
    read: torch.Tensor | None
    fire: torch.Tensor
    clock: torch.Tensor
    rounds: int
    reuse: bool
    equal_reuse: bool


@dataclass(frozen=True)
class Source:
    """Where spans lie in host memory. lengths float32, starts int32 [S]: of spans, in tokens; packed int64 [H, S]:
    above 0 for those that lie as factors, None: all are rows of the pool; page: tokens of a row; origin: position that
    row 0 begins with; unit_bytes: of a row of one KV head."""

    lengths: torch.Tensor
    starts: torch.Tensor
    packed: torch.Tensor | None
    page: int
    origin: int
    unit_bytes: int


@dataclass(frozen=True)
class Moves:
    """What is to be moved. unit int32 [H, M]: into each cell, as kernels/page_moves.py numbers units, -1: nothing;
    bytes int64 [H]: of these; rebuilt bool [H, M]: cells that factors fill; came bool [H, S]: spans whose factors do
    (None where there are no factors)."""

    unit: torch.Tensor
    bytes: torch.Tensor
    rebuilt: torch.Tensor | None
    came: torch.Tensor | None


@dataclass(frozen=True)
class CellPlan:
    """fill bool [H, M]: cells that something has to be moved into (what: the tables' span and offset); gone bool [H,
    S]: spans of which nothing is left; moved int64 [H]: cells to be moved."""

    fill: torch.Tensor
    gone: torch.Tensor
    moved: torch.Tensor


def zone_plan_torch(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """Plan what is wished for, and rename: `tables` and `names` say afterwards what lies in the zone once the moves are
    made."""
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
    requested, fire = wishes.requested, wishes.fire
    tokens = source.lengths.long()[requested.clamp(min=0)]
    if wishes.read is not None:
        tokens = wishes.read.amax(1).gather(1, requested.clamp(min=0))
    count = torch.where((requested >= 0) & fire[:, None], tokens // source.page, 0)
    accepted = fit(count, tables.live.shape[1], wishes.rounds)
    keep = None
    if not wishes.reuse:
        keep = torch.zeros(1, 1, dtype=torch.long, device=requested.device)
    elif wishes.equal_reuse:
        there = reusable(tables, requested, count, accepted).sum(1)
        keep = torch.where(fire, there, NEVER).min().view(1, 1)
    return plan(tables, requested, count, accepted, wishes.clock, keep)


def rename(tables: ZoneTables, done: CellPlan, rebuilt: torch.Tensor | None, names: Names, source: Source) -> None:
    """The zone's slots take the names of what lies in them now. rebuilt bool [H, M]: cells whose spans lie as
    factors."""
    page = source.page
    first = source.starts.long()[tables.span] + tables.offset * page
    at = (first[..., None] + torch.arange(page, device=first.device)).flatten(1)
    new, live, spans = (x.repeat_interleave(page, 1) if page > 1 else x for x in (done.fill, tables.live, tables.span))
    names.position.copy_(torch.where(new, at, names.position))
    names.span.copy_(torch.where(new, spans, names.span))
    resident, reconstructed, free = names.roles
    named = torch.where(live, resident, free)
    if rebuilt is not None:
        factored = rebuilt.repeat_interleave(page, 1) if page > 1 else rebuilt
        named = torch.where(live & factored, reconstructed, named)
    names.role.copy_(named)
    names.is_hot.copy_((names.is_hot & ~done.gone) | (tables.held > 0))


def rounds_for(shortest: int, longest: int) -> int:
    """How many rounds `fit` needs for wishes of `shortest` to `longest` cells: after the first there are fewer than
    `longest` cells left, and every further one takes `shortest` at least."""
    return 1 + (longest - 1) // shortest


def fit(count: torch.Tensor, room: int, rounds: int) -> torch.Tensor:
    """Which wishes are accepted: greedy in order of priority, skipping what does not fit. count int64 [H, W], 0 = no
    wish -> bool [H, W].

    What is larger than the room left is refused for good, since room only shrinks; of the others a round takes all that
    fit one after the other, and refuses the first that does not.
    """
    left = torch.full_like(count[:, :1], room)
    accepted, open_ = torch.zeros_like(count, dtype=torch.bool), count > 0
    for _ in range(rounds):
        open_ = open_ & (count <= left)
        reached = torch.where(open_, count, 0).cumsum(1)
        taken = open_ & (reached <= left)
        first_failing = open_ & (reached > left) & ((open_ & (reached > left)).cumsum(1) == 1)
        accepted, open_ = accepted | taken, open_ & ~taken & ~first_failing
        left = left - torch.where(taken, count, 0).sum(1, keepdim=True)
    return accepted


def reusable(tables: ZoneTables, requested: torch.Tensor, count: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Cells of accepted wishes that are there already, [H, W]."""
    there = tables.held.gather(1, requested.clamp(min=0))
    return torch.where(accepted, torch.minimum(count, there), 0)


def plan(
    tables: ZoneTables,
    requested: torch.Tensor,
    count: torch.Tensor,
    accepted: torch.Tensor,
    clock: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> CellPlan:
    """Make room for the accepted wishes: spans not wanted give way, the least recently wanted first; of a span held
    with more cells than wanted the rest is given up. requested, count int64 [H, W] by priority; clock int64 0-d, larger
    at every call for a head; keep [1, 1]: how many cells stay at most, those of lowest priority beyond it are given up
    and moved again.
    """
    wishes = requested.shape[1]
    index = torch.where(accepted, requested, 0)
    stay = reusable(tables, requested, count, accepted)
    if keep is not None:
        stay = torch.minimum(stay, (keep - (stay.cumsum(1) - stay)).clamp(min=0))
    wanted = torch.zeros_like(tables.held, dtype=torch.bool).scatter(1, index, True)
    kept = tables.held.scatter(1, index, stay)
    missing = torch.where(accepted, count - stay, 0)
    total = missing.sum(1, keepdim=True)
    shortage = total - (tables.live.shape[1] - kept.sum(1, keepdim=True))
    gone = _victims(kept, tables.stamp, ~wanted & (kept > 0), shortage)
    kept = kept.masked_fill(gone, 0)

    live = tables.live & (tables.offset < kept.gather(1, tables.span))
    free = ~live
    rank = free.cumsum(1) - 1
    fill = free & (rank < total)
    ends = missing.cumsum(1)
    wish = torch.searchsorted(ends, rank, right=True).clamp(max=wishes - 1)
    tables.span.copy_(torch.where(fill, index.gather(1, wish), tables.span))
    offset = stay.gather(1, wish) + rank - (ends - missing).gather(1, wish)
    tables.offset.copy_(torch.where(fill, offset, tables.offset))
    tables.live.copy_(live | fill)
    tables.held.copy_(kept.scatter(1, index, torch.where(accepted, count, 0)))
    order = torch.arange(wishes, 0, -1, device=requested.device).expand_as(requested)
    tables.stamp.copy_(tables.stamp.scatter(1, index, clock * wishes + order))
    return CellPlan(fill, gone, total[:, 0])


def _victims(kept: torch.Tensor, stamp: torch.Tensor, candidate: torch.Tensor, shortage: torch.Tensor) -> torch.Tensor:
    """Candidates that go, the least recently wanted first, until `shortage` [H, 1] cells are free: bool [H, S]."""
    order = torch.where(candidate, stamp, NEVER).argsort(dim=1, stable=True)
    sizes = torch.where(candidate, kept, 0).gather(1, order)
    before = sizes.cumsum(1) - sizes
    goes = candidate.gather(1, order) & (before < shortage)
    return torch.zeros_like(candidate).scatter(1, order, goes)
