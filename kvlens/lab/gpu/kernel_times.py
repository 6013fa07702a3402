"""Times of single kernels at the 8B shape against the ceiling that limits each, launched in a graph over more data than
caches hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvlens.kernels.lowrank_bytes import factor_bytes
from kvlens.kernels.page_scores import page_scores
from kvlens.kernels.pool_attend import Live
from kvlens.kernels.slot_tables import SlotReads, slot_tables, slot_tables_torch
from kvlens.kernels.zone_tables import Moves, Names, Source, Wishes, ZoneTables
from kvlens.kernels.zone_torch import zone_plan_torch
from kvlens.lab.gpu import calls, drawn
from kvlens.lab.gpu.ceilings import COPY, TO_DEVICE, TO_HOST
from kvlens.lab.gpu.device import Step
from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.kernels.arrivals import Arrivals, arrivals, arrivals_torch, fill_cells, fill_cells_torch
from kvlens.lab.gpu.kernels.lowrank_spans import Spans, attend
from kvlens.lab.gpu.kernels.page_moves import gather, move_triton, offload
from kvlens.lab.gpu.kernels.zone_plan import zone_plan
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.results.gpu import KernelRow, ceiling

AIM = 0.8
SPAN, RANK = 64, 16
"""tokens and rank of a span's factors"""
SPREAD = 512 << 20
"""bytes that the copies of a kernel's input come to, far above an H100's 50 MB of L2"""
SMALLER = "measure fewer contexts: --contexts 8192,32768"

Planner = Callable[[ZoneTables, Names, Wishes, Source], Moves]


def measure(bench: Bench) -> Iterator[KernelRow]:
    for kernel in (_attend, _scores, _spans, _moves, _zones, _arrived, _tables):
        yield from kernel(bench)


def _row(
    bench: Bench, kernel: str, setting: str, make: Callable[[], Step], size: int, limit: str, aim: float | None = None
) -> KernelRow:
    """`make` builds one call on fresh data. A failure is the row's reason; the other rows go on."""
    copies = 2 if bench.dry else max(2, min(64, math.ceil(SPREAD / size)))
    try:
        seconds = bench.device.per_call([make() for _ in range(copies)], 3 if bench.dry else 30)
    except Exception as problem:
        if not bench.device.alive():
            raise
        return KernelRow(kernel, setting, None, size, None, limit, None, aim, sentence(problem, SMALLER)[0])
    finally:
        bench.device.release()
    best = ceiling(bench.result, limit)
    return KernelRow(
        kernel, setting, seconds, size, size / seconds, limit, size / seconds / best if best else None, aim
    )


def _attend(bench: Bench) -> Iterator[KernelRow]:
    kv = bench.model.kv
    for context in bench.contexts:
        for share in (1.0, 0.1):
            tokens = max(2, round(share * context / PAGE)) * PAGE
            size = kv.kv_heads * tokens // PAGE * (PAGE * kv.head_token_bytes + 8)
            name, aim = f"{tokens} tokens ({share:.0%} of {context})", AIM if share == 1 else None
            yield _row(bench, "k1", name, partial(calls.k1_step, bench, tokens, False, None), size, COPY, aim)
            yield _row(
                bench, "k1", f"{name}, masses", partial(calls.k1_step, bench, tokens, True, None), size, COPY, aim
            )
            for splits in () if bench.dry else (8, 16, 32, 64):
                yield _row(
                    bench,
                    "k1",
                    f"{name}, {splits} splits",
                    partial(calls.k1_step, bench, tokens, False, splits),
                    size,
                    COPY,
                )
            if share == 1:
                yield _row(bench, "SDPA", name, partial(calls.library_step, bench, tokens, calls.sdpa), size, COPY)
                if not bench.dry:
                    yield _row(
                        bench,
                        "flex_attention",
                        name,
                        partial(calls.library_step, bench, tokens, calls.flex),
                        size,
                        COPY,
                    )


def _score_step(bench: Bench, places: int, top: bool) -> Step:
    kv = bench.model.kv
    q, lo, hi = calls.context(bench, places)
    every = torch.ones(places, dtype=torch.bool, device=bench.device.at).expand(1, kv.kv_heads, -1)

    def step() -> None:
        scores = page_scores(q, lo, hi, every, "MeanS", 1.0)
        if top:
            scores.topk(min(32, places), dim=-1)

    return step


def _scores(bench: Bench) -> Iterator[KernelRow]:
    for context in bench.contexts:
        places = context // PAGE
        size = bench.model.kv.kv_heads * places * bench.model.kv.head_token_bytes
        yield _row(bench, "k2", f"{places} pages, MeanS", partial(_score_step, bench, places, False), size, COPY)
        yield _row(
            bench,
            "k2 and topk",
            f"{places} pages, MeanS, 32 wanted",
            partial(_score_step, bench, places, True),
            size,
            COPY,
        )


def _span_step(bench: Bench, spans: int, unit: int) -> Step:
    kv = bench.model.kv
    meta = torch.tensor((0, SPAN, RANK, RANK)).repeat(1, kv.kv_heads, spans, 1)
    meta[..., 0] = torch.arange(kv.kv_heads * spans).view(kv.kv_heads, spans) * (unit // kv.itemsize)
    source = Spans(bench.device.normal(kv.kv_heads * spans * unit // kv.itemsize), meta.to(bench.device.at), RANK)
    q = bench.device.normal(1, kv.q_heads, kv.head_dim)
    return lambda: attend(q, source, None, kv.head_dim**-0.5)


def _spans(bench: Bench) -> Iterator[KernelRow]:
    kv = bench.model.kv
    unit = factor_bytes(SPAN, RANK, RANK, kv.head_dim, kv.itemsize)
    for spans in (2,) if bench.dry else (26, 102):
        setting = f"{spans} spans of {SPAN} tokens, rank {RANK}"
        yield _row(
            bench, "k3 attend", setting, partial(_span_step, bench, spans, unit), kv.kv_heads * spans * unit, COPY
        )


def _move_step(bench: Bench, count: int, to_pool: bool, ctas: int | None) -> Step:
    kv, position, pool = bench.model.kv, bench.device.at, bench.pool
    each = torch.arange(count, dtype=torch.int32)
    # one page per move, so no two moves write one unit
    unit = (torch.randperm(len(pool))[:count].int() * kv.kv_heads + each % kv.kv_heads).to(position)
    slot = (each // kv.kv_heads).to(position)
    shape = (-(-count // kv.kv_heads), PAGE, kv.kv_heads, kv.head_dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=position).transpose(1, 2) for _ in range(2))
    if ctas is not None:
        return lambda: move_triton(pool, unit, slot, keys, values, to_pool, ctas)
    return lambda: (offload if to_pool else gather)(pool, unit, slot, keys, values)


def _moves(bench: Bench) -> Iterator[KernelRow]:
    for count in (16,) if bench.dry else (16, 36, 77, 256, 2048):
        size = count * PAGE * bench.model.kv.head_token_bytes
        aim = AIM if count >= 256 else None
        yield _row(
            bench, "k4 gather", f"{count} units", partial(_move_step, bench, count, False, None), size, TO_DEVICE, aim
        )
        for ctas in () if bench.dry else (4, 8, 16, 32):
            setting = f"{count} units, {ctas} CTAs"
            yield _row(bench, "k4 gather", setting, partial(_move_step, bench, count, False, ctas), size, TO_DEVICE)
        yield _row(bench, "k4 offload", f"{count} units", partial(_move_step, bench, count, True, None), size, TO_HOST)


def _zone_step(bench: Bench, zone: drawn.Zone, plan: Planner) -> Step:
    """Two plans, with other wishes each, so that something is missing every time."""
    kv, position = bench.model.kv, bench.device.at
    tables, names, source = (drawn.copy_to(value, position) for value in drawn.zone_tables(zone, kv.kv_heads))
    turns = [drawn.copy_to(drawn.zone_wishes(zone, kv.kv_heads, kv.group, step), position) for step in (1, 2)]
    return lambda: [plan(tables, names, wishes, source) for wishes in turns]


def _zones(bench: Bench) -> Iterator[KernelRow]:
    """Bytes of the tables that a plan goes through at least once."""
    for zone in drawn.SMALL_ZONES if bench.dry else drawn.ZONES:
        size = 2 * bench.model.kv.kv_heads * (18 * zone.spans + 21 * zone.cells + zone.page * zone.cells)
        setting = f"{zone.name}: {zone.wishes} wishes, {zone.cells} cells, {zone.spans} spans, two plans"
        for name, plan in (("zone plan", zone_plan), ("zone plan by PyTorch", zone_plan_torch)):
            yield _row(bench, name, setting, partial(_zone_step, bench, zone, plan), size, COPY)


def _arrived_step(
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


def _arrived(bench: Bench) -> Iterator[KernelRow]:
    """What stands around k3 in a static step, by bytes of what comes: all places of a KV head, none of another, a third
    of the others'."""
    kv = bench.model.kv
    for spans, places in ((40, 3),) if bench.dry else ((513, 26), (2048, 102)):
        used = (1 + (kv.kv_heads - 2) / 3) * places
        size = round(
            kv.kv_heads * (9 * spans + 24 * places + places * SPAN)
            + used * (24 + SPAN * 0.75 * (24 + 2 * kv.head_token_bytes))
        )
        name = f"{places} of {spans} spans of {SPAN // 2} to {SPAN} tokens"
        for kernel, calls_ in (
            ("arrivals", (arrivals, fill_cells)),
            ("arrivals by PyTorch", (arrivals_torch, fill_cells_torch)),
        ):
            yield _row(bench, kernel, name, partial(_arrived_step, bench, spans, places, *calls_), size, COPY)


def _table_step(bench: Bench, count: int, page: int, make: Callable[[SlotReads, int], Live]) -> Step:
    kv = bench.model.kv
    reads = drawn.copy_to(
        drawn.slots_read(kv.kv_heads, kv.group, count, max(1, count // PAGE), parts=False), bench.device.at
    )
    return lambda: make(reads, page)


def _tables(bench: Bench) -> Iterator[KernelRow]:
    """Pages of one slot are what instruments ask for."""
    kv = bench.model.kv
    for count in (300,) if bench.dry else (2048, 13_107, 131_072):
        size = kv.kv_heads * count * (5 + 5 * kv.group)
        for page in (PAGE, 1):
            name = f"{count} slots, pages of {page}"
            yield _row(bench, "slot tables", name, partial(_table_step, bench, count, page, slot_tables), size, COPY)
        by_torch = partial(_table_step, bench, count, PAGE, slot_tables_torch)
        yield _row(bench, "slot tables by PyTorch", f"{count} slots, pages of {PAGE}", by_torch, size, COPY)


PART = Part("kernels", measure, ("kernel_times.py", "drawn.py", "calls.py", "ceilings.py", "failures.py"), SMALLER)
