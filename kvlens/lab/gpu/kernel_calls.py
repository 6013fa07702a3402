"""One call of each kernel on fresh data at the 8B shape, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvlens.kernels.page_scores import page_scores
from kvlens.kernels.pool_attend import Live
from kvlens.kernels.slot_tables import SlotReads
from kvlens.kernels.token_gather import gather_tokens
from kvlens.kernels.zone_tables import Moves, Names, Source, Wishes, ZoneTables
from kvlens.lab.gpu import calls, drawn
from kvlens.lab.gpu.device import Step
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.kernels.arrivals import Arrivals
from kvlens.lab.gpu.kernels.lowrank_spans import Spans, attend
from kvlens.lab.gpu.kernels.page_moves import gather, offload
from kvlens.lab.gpu.part import Bench

SPAN, RANK = 64, 16
"""tokens and rank of a span's factors"""

Planner = Callable[[ZoneTables, Names, Wishes, Source], Moves]


def score_step(bench: Bench, places: int, top: bool) -> Step:
    kv = bench.model.kv
    q, lo, hi = calls.context(bench, places)
    every = torch.ones(places, dtype=torch.bool, device=bench.device.at).expand(1, kv.kv_heads, -1)

    def step() -> None:
        scores = page_scores(q, lo, hi, every, "MeanS", 1.0)
        if top:
            scores.topk(min(32, places), dim=-1)

    return step


def span_step(bench: Bench, spans: int, unit: int) -> Step:
    kv = bench.model.kv
    meta = torch.tensor((0, SPAN, RANK, RANK)).repeat(1, kv.kv_heads, spans, 1)
    meta[..., 0] = torch.arange(kv.kv_heads * spans).view(kv.kv_heads, spans) * (unit // kv.itemsize)
    source = Spans(bench.device.normal(kv.kv_heads * spans * unit // kv.itemsize), meta.to(bench.device.at), RANK)
    q = bench.device.normal(1, kv.q_heads, kv.head_dim)
    return lambda: attend(q, source, None, kv.head_dim**-0.5)


def move_step(bench: Bench, count: int, to_pool: bool) -> Step:
    kv, position, pool = bench.model.kv, bench.device.at, bench.pool
    each = torch.arange(count, dtype=torch.int32)
    # one page per move, so no two moves write one unit
    unit = (torch.randperm(len(pool))[:count].int() * kv.kv_heads + each % kv.kv_heads).to(position)
    slot = (each // kv.kv_heads).to(position)
    shape = (-(-count // kv.kv_heads), PAGE, kv.kv_heads, kv.head_dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=position).transpose(1, 2) for _ in range(2))
    return lambda: (offload if to_pool else gather)(pool, unit, slot, keys, values)


def token_step(bench: Bench, count: int) -> Step:
    """Single tokens anywhere in the pool, into slots anywhere. A token's values lie right behind its keys, as in every
    run that fetches tokens."""
    kv, position = bench.model.kv, bench.device.at
    rows = bench.pool.view(-1, kv.head_dim)
    slots = -(-2 * count // kv.kv_heads)
    places = torch.randperm(kv.kv_heads * slots)[:count]
    token = 2 * torch.randint(0, len(rows) // 2, (count,))
    listed = torch.stack((token, places // slots, places % slots)).to(position)
    keys, values = (
        torch.zeros(kv.kv_heads, slots, kv.head_dim, dtype=torch.bfloat16, device=position) for _ in range(2)
    )
    return lambda: gather_tokens(rows, 1, listed, keys, values)


def zone_step(bench: Bench, zone: drawn.Zone, plan: Planner) -> Step:
    """Two plans, with other wishes each, so that something is missing every time."""
    kv, position = bench.model.kv, bench.device.at
    tables, names, source = (drawn.copy_to(value, position) for value in drawn.zone_tables(zone, kv.kv_heads))
    turns = [drawn.copy_to(drawn.zone_wishes(zone, kv.kv_heads, kv.group, step), position) for step in (1, 2)]
    return lambda: [plan(tables, names, wishes, source) for wishes in turns]


def arrived_step(
    bench: Bench, spans: int, places: int, list_: Callable[..., Arrivals], fill: Callable[..., None]
) -> Step:
    source = drawn.copy_to(
        drawn.arrived(bench.model.kv.kv_heads, spans, places, SPAN, bench.model.kv.head_dim), bench.device.at
    )

    def step() -> None:
        listed = list_(source.came, source.meta, places, bench.model.kv.head_dim, bench.model.kv.itemsize)
        fill(
            (source.new[0], source.new[1]),
            listed.turn,
            source.span,
            source.offset,
            source.fill,
            source.cells[0],
            source.cells[1],
        )

    return step


def table_step(bench: Bench, count: int, page: int, make: Callable[[SlotReads, int], Live]) -> Step:
    kv = bench.model.kv
    reads = drawn.copy_to(
        drawn.slots_read(kv.kv_heads, kv.group, count, max(1, count // PAGE), parts=False), bench.device.at
    )
    return lambda: make(reads, page)
