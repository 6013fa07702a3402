"""The recall of one layer's KV heads, planned in torch operations of fixed shape: what fits, what is there already,
which spans give way, what each cell holds from now on.

The one reference of the plan. The static step plans by `zone_plan_torch`, or by the kernel, which equals it bit for bit
(kvlens/lab/gpu/kernels/zone_plan.py); the memory plans on the host as `decide` does (kernels/zone_host.py). Words and
shapes: kernels/zone_tables.py.
"""

from __future__ import annotations

import torch

from kvlens.kernels.zone_tables import CellPlan, Moves, Names, Source, Wishes, ZoneTables

NEVER = torch.iinfo(torch.int64).max


def zone_plan_torch(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """Plan what is wished for, and rename: `tables` and `names` say afterwards what lies in the zone once the moves are
    made."""
    page = source.page
    plan = decide(tables, wishes, source.lengths, page)
    raw, rebuilt, came, here = plan.fill, None, None, None
    if source.packed is not None:
        packed = source.packed > 0
        here = packed.gather(1, tables.span)
        raw, rebuilt = plan.fill & ~here, plan.fill & here
        came = torch.zeros_like(packed).scatter(1, torch.where(rebuilt, tables.span, 0), True) & packed
    rename(tables, plan, here, names, source)
    row = (source.starts.long()[tables.span] - source.origin) // page + tables.offset
    heads = len(row)
    unit = torch.where(raw, row * heads + torch.arange(heads, device=row.device)[:, None], -1).int()
    return Moves(unit, raw.sum(1) * source.unit_bytes, rebuilt, came)


def decide(tables: ZoneTables, wishes: Wishes, lengths: torch.Tensor, page: int) -> CellPlan:
    """The plan alone: `tables` are written, nothing is renamed. lengths [S]: tokens of spans; page: tokens of a
    cell."""
    requested, fire = wishes.requested, wishes.fire
    named = requested.clamp(min=0)
    tokens = lengths[named].long() if wishes.read is None else wishes.read.amax(1).gather(1, named)
    count = torch.where((requested >= 0) & fire[:, None], tokens // page, 0)
    accepted = fit(count, tables.live.shape[1], wishes.rounds)
    present = torch.where(accepted, torch.minimum(count, tables.held.gather(1, named)), 0)
    stay = present
    if not wishes.reuse:
        stay = torch.zeros_like(present)
    elif wishes.equal_reuse:
        least = torch.where(fire, present.sum(1), NEVER).min()
        stay = torch.minimum(present, (least - (present.cumsum(1) - present)).clamp(min=0))
    return place(tables, requested, count, accepted, present, stay, wishes.clock)


def rename(tables: ZoneTables, plan: CellPlan, rebuilt: torch.Tensor | None, names: Names, source: Source) -> None:
    """The zone's slots take the names of what lies in them now. rebuilt bool [H, M]: cells whose spans lie as
    factors."""
    page = source.page
    start = source.starts.long()[tables.span] + tables.offset * page
    positions = (start[..., None] + torch.arange(page, device=start.device)).flatten(1)
    new, live, spans = (x.repeat_interleave(page, 1) if page > 1 else x for x in (plan.fill, tables.live, tables.span))
    names.position.copy_(torch.where(new, positions, names.position))
    names.span.copy_(torch.where(new, spans, names.span))
    resident, reconstructed, free = names.roles
    named = torch.where(live, resident, free)
    if rebuilt is not None:
        factored = rebuilt.repeat_interleave(page, 1) if page > 1 else rebuilt
        named = torch.where(live & factored, reconstructed, named)
    names.role.copy_(named)
    names.is_hot.copy_((names.is_hot & ~plan.gone) | (tables.held > 0))


def rounds_for(shortest: int, longest: int) -> int:
    """How many rounds `fit` needs for wishes of `shortest` to `longest` cells: after the first there are fewer than
    `longest` cells left, and every further one takes `shortest` at least."""
    return 1 + (longest - 1) // shortest


def fit(count: torch.Tensor, room: int, rounds: int | None) -> torch.Tensor:
    """Which wishes are accepted: greedy in order of priority, skipping what does not fit. count int64 [H, W], 0 = no
    wish -> bool [H, W]. rounds: None: as many as it takes, which reads a tensor after each.

    What is larger than the room left is refused for good, since room only shrinks; of the others a round takes all that
    fit one after the other, and refuses the first that does not.
    """
    remaining = torch.full_like(count[:, :1], room)
    accepted, open_, rounds_done = torch.zeros_like(count, dtype=torch.bool), count > 0, 0
    while bool(open_.any()) if rounds is None else rounds_done < rounds:
        open_ = open_ & (count <= remaining)
        reached = torch.where(open_, count, 0).cumsum(1)
        over = open_ & (reached > remaining)
        granted = open_ & ~over
        accepted, open_ = accepted | granted, over & (over.cumsum(1) > 1)
        remaining = remaining - torch.where(granted, count, 0).sum(1, keepdim=True)
        rounds_done += 1
    return accepted


def place(
    tables: ZoneTables,
    requested: torch.Tensor,
    count: torch.Tensor,
    accepted: torch.Tensor,
    present: torch.Tensor,
    stay: torch.Tensor,
    clock: torch.Tensor,
) -> CellPlan:
    """Make room for the accepted wishes and give them cells: spans not wanted give way, the least recently wanted
    first; of a span held with more cells than stay the rest is given up. Free cells are taken from the first on. As
    `CellPlan` and `Wishes` have them; `tables` are written."""
    wishes = requested.shape[1]
    index = torch.where(accepted, requested, 0)
    wished = torch.zeros_like(tables.held, dtype=torch.bool).scatter(1, index, True)
    cells = tables.held.scatter(1, index, stay)
    missing = torch.where(accepted, count - stay, 0)
    ends = missing.cumsum(1)
    total = missing.sum(1, keepdim=True)
    shortage = total - (tables.live.shape[1] - cells.sum(1, keepdim=True))
    victims = _victims(cells, tables.stamp, ~wished & (cells > 0), shortage)
    cells = cells.masked_fill(victims, 0)

    stays = tables.live & (tables.offset < cells.gather(1, tables.span))
    rank = (~stays).cumsum(1) - 1
    fill = ~stays & (rank < total)
    freed = tables.live & ~stays
    wish = torch.searchsorted(ends, rank, right=True).clamp(max=wishes - 1)
    tables.span.copy_(torch.where(fill, index.gather(1, wish), tables.span))
    offset = stay.gather(1, wish) + rank - (ends - missing).gather(1, wish)
    tables.offset.copy_(torch.where(fill, offset, tables.offset))
    tables.live.copy_(stays | fill)
    tables.held.copy_(cells.scatter(1, index, torch.where(accepted, count, 0)))
    order = torch.arange(wishes, 0, -1, device=requested.device).expand_as(requested)
    tables.stamp.copy_(tables.stamp.scatter(1, index, clock * wishes + order))
    return CellPlan(count, accepted, present, stay, fill, freed, victims)


def _victims(cells: torch.Tensor, stamp: torch.Tensor, candidate: torch.Tensor, shortage: torch.Tensor) -> torch.Tensor:
    """Candidates that go, the least recently wanted first, until `shortage` [H, 1] cells are free: bool [H, S]."""
    order = torch.where(candidate, stamp, NEVER).argsort(dim=1, stable=True)
    sizes = torch.where(candidate, cells, 0).gather(1, order)
    freed_before = sizes.cumsum(1) - sizes
    goes = candidate.gather(1, order) & (freed_before < shortage)
    return torch.zeros_like(candidate).scatter(1, order, goes)
