"""The recall of one layer's KV heads, planned on the host: what fits, what is there already, which spans give way, what
each cell holds from now on.

The same plan as `kvlens.kernels.zone_torch.decide`, which is the reference and is made of operations of fixed shape for
a device that captures them. Here what is decided is known at once, so that only what moves is handled: a step of a
recalling method plans every layer, and most of these plans move little. Words and shapes: kernels/zone_tables.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

INT = np.int64


@dataclass(frozen=True)
class HostTables:
    """What the zones of one layer hold: as `kvlens.kernels.zone_tables.ZoneTables`, on the host."""

    held: np.ndarray
    stamp: np.ndarray
    span: np.ndarray
    offset: np.ndarray
    live: np.ndarray

    @classmethod
    def empty(cls, heads: int, spans: int, cells: int) -> HostTables:
        """Return zones that hold nothing."""
        held, stamp, span, offset = (np.zeros((heads, size), INT) for size in (spans, spans, cells, cells))
        return cls(held, stamp, span, offset, np.zeros((heads, cells), bool))


@dataclass(frozen=True)
class HostWishes:
    """What the KV heads of a layer wish for: as `kvlens.kernels.zone_tables.Wishes`, on the host. count int64 [H, W]:
    cells of each wish, 0: no wish, or one of a KV head that does not fire."""

    requested: np.ndarray
    count: np.ndarray
    fire: np.ndarray
    clock: int
    reuse: bool = True
    equal_reuse: bool = False


@dataclass(frozen=True)
class HostPlan:
    """What is decided. Of the wishes [H, W]: accepted bool; present int64: cells that an accepted wish finds in the
    zone; stay int64: those of them that are not moved again; missing int64: cells to be moved. Of the zone: heads,
    cells int64 [n]: what is moved goes there, by KV head and then by the wishes in their order; freed bool [H, M]:
    cells whose content is given up, filled again or not, None: none; departed int64 [2, m]: KV head and span of which
    nothing is left, the least recently wanted first."""

    accepted: np.ndarray
    present: np.ndarray
    stay: np.ndarray
    missing: np.ndarray
    heads: np.ndarray
    cells: np.ndarray
    freed: np.ndarray | None
    departed: np.ndarray


NOTHING = np.empty(0, INT)
NO_UNITS = np.empty((2, 0), INT)


def decide_on_host(tables: HostTables, wishes: HostWishes) -> HostPlan:
    """Plan what is wished for; `tables` are written. Greedy in order of priority, skipping what does not fit; spans not
    wished for give way, the least recently wanted first; free cells are taken from the first on."""
    count, width, rows = wishes.count, wishes.count.shape[1], np.arange(len(tables.held))[:, None]
    accepted = _fitting(count, tables.live.shape[1])
    index, granted = wishes.requested * accepted, count * accepted
    held = tables.held[rows, index]
    present = stay = np.minimum(granted, held)
    if not wishes.reuse:
        stay = np.zeros_like(present)
    elif wishes.equal_reuse:
        least = present.sum(1)[wishes.fire].min(initial=np.iinfo(INT).max)
        stay = np.minimum(present, np.maximum(least - (present.cumsum(1) - present), 0))
    missing = granted - stay
    tables.stamp[rows, index] = np.arange((wishes.clock + 1) * width, wishes.clock * width, -1)
    if np.array_equal(stay, granted) and np.array_equal(stay, held):
        return HostPlan(accepted, present, stay, missing, NOTHING, NOTHING, None, NO_UNITS)
    tables.held[rows, index] = stay
    departed = _make_room(tables, index, missing.sum(1))
    heads, cells, freed = _fill(tables, rows, index, stay, missing)
    tables.held[rows, index] = granted
    return HostPlan(accepted, present, stay, missing, heads, cells, freed, departed)


def _fitting(count: np.ndarray, room: int) -> np.ndarray:
    """Return which wishes fit into `room` cells, bool [H, W]."""
    is_wish = count > 0
    for head in (count.sum(1) > room).nonzero()[0].tolist():
        room_left = room
        for wish, cells in enumerate(count[head].tolist()):
            if cells <= room_left:
                room_left -= cells
            else:
                is_wish[head, wish] = False
    return is_wish


def _make_room(tables: HostTables, index: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Let go of spans that are not wished for until there is room for `total` cells [H]; return them as
    `HostPlan.departed` has them."""
    shortage = total + tables.held.sum(1) - tables.live.shape[1]
    short = (shortage > 0).nonzero()[0]
    if not len(short):
        return NO_UNITS
    may_go = tables.held > 0
    may_go[np.arange(len(index))[:, None], index] = False
    departed = []
    for head in short.tolist():
        held, spans = tables.held[head], may_go[head].nonzero()[0]
        spans = spans[tables.stamp[head, spans].argsort(kind="stable")]
        sizes = held[spans]
        spans = spans[sizes.cumsum() - sizes < shortage[head]]
        held[spans] = 0
        departed.append(spans)
    return np.array((short.repeat([len(spans) for spans in departed]), np.concatenate(departed)))


def _fill(
    tables: HostTables, rows: np.ndarray, index: np.ndarray, stay: np.ndarray, missing: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Give missing cells their places; return KV heads and cells of these, and what was freed, as `HostPlan`. rows
    int64 [H, 1]: the KV heads' rows of the tables."""
    stays = tables.live & (tables.offset < tables.held[rows, tables.span])
    free = ~stays
    freed = tables.live & free
    free &= free.cumsum(1) <= missing.sum(1)[:, None]
    heads, cells = free.nonzero()
    short = missing.nonzero()
    counts = missing[short]
    tables.span[heads, cells] = index[short].repeat(counts)
    tables.offset[heads, cells] = np.arange(len(heads)) - (counts.cumsum() - counts - stay[short]).repeat(counts)
    np.logical_or(stays, free, out=tables.live)
    return heads, cells, freed if freed.any() else None
