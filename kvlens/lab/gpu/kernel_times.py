"""Times of single kernels at the 8B shape against the ceiling that limits each, launched in a graph over more data than
caches hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from kvlens.kernels.lowrank_bytes import factor_bytes
from kvlens.kernels.slot_tables import slot_tables, slot_tables_torch
from kvlens.kernels.zone_torch import zone_plan_torch
from kvlens.lab.gpu import calls, drawn
from kvlens.lab.gpu.ceilings import COPY, TO_DEVICE, TO_HOST
from kvlens.lab.gpu.device import Step
from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.kernel_calls import (
    RANK,
    SPAN,
    arrived_step,
    move_step,
    score_step,
    span_step,
    table_step,
    token_step,
    zone_step,
)
from kvlens.lab.gpu.kernels.arrivals import arrivals, arrivals_torch, fill_cells, fill_cells_torch
from kvlens.lab.gpu.kernels.zone_plan import zone_plan
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.results.gpu import KernelRow, ceiling

AIM = 0.8
SPREAD = 512 << 20
"""bytes that the copies of a kernel's input come to, far above an H100's 50 MB of L2"""
SMALLER = "measure fewer contexts: --contexts 8192,32768"


def measure(bench: Bench) -> Iterator[KernelRow]:
    for kernel in (_attend, _scores, _spans, _moves, _tokens, _zones, _arrived, _tables):
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
            yield _row(bench, "k1", name, partial(calls.k1_step, bench, tokens, False), size, COPY, aim)
            yield _row(bench, "k1", f"{name}, masses", partial(calls.k1_step, bench, tokens, True), size, COPY, aim)
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


def _scores(bench: Bench) -> Iterator[KernelRow]:
    for context in bench.contexts:
        places = context // PAGE
        size = bench.model.kv.kv_heads * places * bench.model.kv.head_token_bytes
        yield _row(bench, "k2", f"{places} pages, MeanS", partial(score_step, bench, places, False), size, COPY)
        yield _row(
            bench,
            "k2 and topk",
            f"{places} pages, MeanS, 32 wanted",
            partial(score_step, bench, places, True),
            size,
            COPY,
        )


def _spans(bench: Bench) -> Iterator[KernelRow]:
    kv = bench.model.kv
    unit = factor_bytes(SPAN, RANK, RANK, kv.head_dim, kv.itemsize)
    for spans in (2,) if bench.dry else (26, 102):
        setting = f"{spans} spans of {SPAN} tokens, rank {RANK}"
        yield _row(
            bench, "k3 attend", setting, partial(span_step, bench, spans, unit), kv.kv_heads * spans * unit, COPY
        )


def _moves(bench: Bench) -> Iterator[KernelRow]:
    for count in (16,) if bench.dry else (16, 36, 77, 256, 2048):
        size = count * PAGE * bench.model.kv.head_token_bytes
        aim = AIM if count >= 256 else None
        yield _row(bench, "k4 gather", f"{count} units", partial(move_step, bench, count, False), size, TO_DEVICE, aim)
        yield _row(bench, "k4 offload", f"{count} units", partial(move_step, bench, count, True), size, TO_HOST)


def _tokens(bench: Bench) -> Iterator[KernelRow]:
    for count in (16,) if bench.dry else (64, 512, 4096, 65536):
        size, setting = count * bench.model.kv.head_token_bytes, f"{count} single tokens"
        aim = AIM if count >= 4096 else None
        yield _row(bench, "token gather", setting, partial(token_step, bench, count), size, TO_DEVICE, aim)


def _zones(bench: Bench) -> Iterator[KernelRow]:
    """Bytes of the tables that a plan goes through at least once."""
    for zone in drawn.SMALL_ZONES if bench.dry else drawn.ZONES:
        size = 2 * bench.model.kv.kv_heads * (18 * zone.spans + 21 * zone.cells + zone.page * zone.cells)
        setting = f"{zone.name}: {zone.wishes} wishes, {zone.cells} cells, {zone.spans} spans, two plans"
        for name, plan in (("zone plan", zone_plan), ("zone plan by PyTorch", zone_plan_torch)):
            yield _row(bench, name, setting, partial(zone_step, bench, zone, plan), size, COPY)


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
            yield _row(bench, kernel, name, partial(arrived_step, bench, spans, places, *calls_), size, COPY)


def _tables(bench: Bench) -> Iterator[KernelRow]:
    """Pages of one slot are what instruments ask for."""
    kv = bench.model.kv
    for count in (300,) if bench.dry else (2048, 13_107, 131_072):
        size = kv.kv_heads * count * (5 + 5 * kv.group)
        for page in (PAGE, 1):
            name = f"{count} slots, pages of {page}"
            yield _row(bench, "slot tables", name, partial(table_step, bench, count, page, slot_tables), size, COPY)
        by_torch = partial(table_step, bench, count, PAGE, slot_tables_torch)
        yield _row(bench, "slot tables by PyTorch", f"{count} slots, pages of {PAGE}", by_torch, size, COPY)


PART = Part(
    "kernels",
    measure,
    ("kernel_times.py", "kernel_calls.py", "drawn.py", "calls.py", "ceilings.py", "failures.py"),
    SMALLER,
)
