"""What moves numbers or plans moves on the device, bit for bit what PyTorch does on the host: k4, the zone plan, the
arrivals, the slot tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvlens.kernels import best_rows, chunk_reads, slot_tables, token_gather, zone_torch
from kvlens.lab.gpu import drawn
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.kernels import page_moves, zone_plan
from kvlens.lab.gpu.kernels.arrivals import Arrivals, arrivals, fill_cells
from kvlens.lab.gpu.part import Bench
from kvlens.lab.results.gpu import CheckRow

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HEADS, GROUP, DIM = 8, 4, 128
DTYPES = (torch.bfloat16, torch.float32)
"""numbers of two and of four bytes"""


Way = tuple[str, Callable[[], Iterator[CheckRow]]]
"""a check under its name"""


def ways(bench: Bench) -> list[Way]:
    """Every check of this file."""
    moved: list[Way] = [
        (f"{check.__name__}, {_named(dtype)}", partial(check, bench, dtype))
        for dtype in DTYPES
        for check in (_moves, _single, _tokens, _arrived)
    ]
    return [*moved, *((check.__name__, partial(check, bench)) for check in (_zones, _tables, _best, _chunks))]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _best(bench: Bench) -> Iterator[CheckRow]:
    """Rows in which many entries are equal, and some are -inf."""
    for entries, count in ((300, 32),) if bench.dry else ((1024, 32), (4096, 32), (2048, 2048)):
        score = torch.randint(-40, 40, (HEADS, entries)).float()
        score[1] = torch.randn(entries)
        score[score == -40] = -torch.inf
        ids = 2 * torch.arange(entries) + 1
        results = best_rows.best_rows(score.to(bench.device.at), count)
        yield same(f"best {count} of {entries} entries", results, best_rows.best_rows_torch(score, count))
        results = best_rows.best_rows(score.to(bench.device.at), count, ids.to(bench.device.at))
        exact = best_rows.best_rows_torch(score, count, ids)
        yield same(f"best {count} of {entries} entries, by their names", results, exact)


def _chunks(bench: Bench) -> Iterator[CheckRow]:
    """Chunks of which some rows are not in use, read to their end, in part and not at all."""
    for rows, quota in ((300, 70),) if bench.dry else ((2048, 3272), (8192, 13_000), (8192, 10**6)):
        order = torch.stack([torch.randperm(rows) for _ in range(HEADS)])
        order[1, rows // 3 :] = -1
        lengths, room, position = torch.randint(1, 17, (rows,)), torch.tensor([quota]), bench.device.at
        results = chunk_reads.chunk_reads(order.to(position), lengths.to(position), room.to(position), 2)
        exact = chunk_reads.chunk_reads_torch(order, lengths, room, 2)
        for subject, item, two in zip(exact._fields, results, exact, strict=True):
            yield same(f"{quota} tokens of {rows} chunks: {subject}", item, two)


def same(name: str, values: torch.Tensor, exact: torch.Tensor) -> CheckRow:
    wrong = float((values.cpu() != exact.cpu()).double().mean())
    return CheckRow(f"{name}, bit for bit", wrong, 0.0, wrong == 0)


def _moves(bench: Bench, dtype: torch.dtype) -> Iterator[CheckRow]:
    kv, count = bench.model.kv, 16 if bench.dry else 512
    pool = bench.device.pinned(256, kv.kv_heads, 2, PAGE, kv.head_dim, dtype=dtype)
    pool.copy_(bench.device.normal(*pool.shape, dtype=dtype))
    heads = torch.arange(count) % kv.kv_heads
    unit = (torch.randperm(256).repeat(2)[:count] * kv.kv_heads + heads).int()
    unit[3] = -1
    slot = (torch.arange(count) // kv.kv_heads).int()
    keys, values = (torch.zeros(count, PAGE, kv.kv_heads, kv.head_dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    moved = [x.to(bench.device.at) for x in (unit, slot)]
    present = [x.to(bench.device.at) for x in (keys, values)]
    page_moves.gather(pool, *moved, *present)
    page_moves.gather_torch(pool, unit, slot, keys, values)
    bench.device.wait()
    yield same(f"k4 gather, {_named(dtype)}: keys", present[0], keys)
    yield same(f"k4 gather, {_named(dtype)}: values", present[1], values)
    start = unit[: min(count, 256)]  # no unit twice: two moves into one race
    back = bench.device.pinned(*pool.shape, dtype=dtype).zero_()
    expected = torch.zeros(pool.shape, dtype=dtype)
    page_moves.offload(back, moved[0][: len(start)], moved[1][: len(start)], *present)
    page_moves.offload_torch(expected, start, slot[: len(start)], keys, values)
    bench.device.wait()
    yield same(f"k4 offload, {_named(dtype)}", back, expected)


def _tokens(bench: Bench, dtype: torch.dtype) -> Iterator[CheckRow]:
    """Scattered tokens out of pinned memory, as the engine's link fetches them."""
    count, slots = 37 if bench.dry else 5000, 1024
    pool = bench.device.pinned(8192, DIM, dtype=dtype)
    pool.copy_(bench.device.normal(*pool.shape, dtype=dtype))
    places = torch.randperm(HEADS * slots)[:count]
    for behind in (1, 32):
        listed = torch.stack((torch.randint(0, len(pool) - behind, (count,)), places // slots, places % slots))
        exact = [torch.zeros(HEADS, slots, DIM, dtype=dtype) for _ in range(2)]
        present = [x.to(bench.device.at) for x in exact]
        token_gather.gather_tokens(pool, behind, listed.to(bench.device.at), present[0], present[1])
        token_gather.gather_tokens_torch(pool, behind, listed, exact[0], exact[1])
        bench.device.wait()
        for side, ours, expected in zip(("keys", "values"), present, exact, strict=True):
            yield same(f"token gather, {_named(dtype)}, values {behind} rows behind keys: {side}", ours, expected)


def _single(bench: Bench, dtype: torch.dtype) -> Iterator[CheckRow]:
    """k4 with units of one token, whose slots are their places."""
    kv, cells = bench.model.kv, 37 if bench.dry else 3000
    pool = bench.device.pinned(4096, kv.kv_heads, 2, 1, kv.head_dim, dtype=dtype)
    pool.copy_(bench.device.normal(*pool.shape, dtype=dtype))
    heads = torch.arange(kv.kv_heads)[:, None]
    unit = torch.randint(0, 4096, (kv.kv_heads, cells)) * kv.kv_heads + heads
    unit = torch.where(torch.rand(unit.shape) < 0.5, -1, unit).int()
    exact = [torch.zeros(cells, kv.kv_heads, 1, kv.head_dim, dtype=dtype) for _ in range(2)]
    present = [x.to(bench.device.at) for x in exact]
    page_moves.gather(pool, unit.to(bench.device.at), None, *present)
    page_moves.gather_torch(pool, unit, None, *exact)
    bench.device.wait()
    for side, ours, expected in zip(("keys", "values"), present, exact, strict=True):
        yield same(f"k4 gather of single tokens, {_named(dtype)}: {side}", ours, expected)


def _equal(result: DataclassInstance, reference: DataclassInstance) -> bool:
    """Return True if all fields are equal, tensors bit for bit. reference: on the CPU."""
    pairs = zip(dataclasses.astuple(result), dataclasses.astuple(reference), strict=True)
    return all(torch.equal(item.cpu(), two) if isinstance(two, torch.Tensor) else item == two for item, two in pairs)


def _zones(bench: Bench) -> Iterator[CheckRow]:
    for zone in drawn.SMALL_ZONES if bench.dry else drawn.ZONES:
        reference = drawn.zone_tables(zone, HEADS)
        ours = [drawn.copy_to(value, bench.device.at) for value in reference]
        equal = True
        for step in range(1, 9):
            wishes = drawn.zone_wishes(zone, HEADS, GROUP, step, 0.8)
            results = zone_plan.zone_plan(ours[0], ours[1], drawn.copy_to(wishes, bench.device.at), ours[2])
            exact = zone_torch.zone_plan_torch(*reference[:2], wishes, reference[2])
            for tables in (ours[0], reference[0]):
                tables.stamp[:, 0] = (
                    0  # of the span that nobody wishes for: the torch plan writes there what belongs to none
                )
            equal = equal and _equal(results, exact) and _equal(ours[0], reference[0]) and _equal(ours[1], reference[1])
        name = (
            f"zone plan, {zone.name}: {zone.wishes} wishes, {zone.cells} cells, {zone.spans} spans, 8 "
            f"steps, bit for bit"
        )
        yield CheckRow(name, float(not equal), 0.0, equal)


def _arrived(bench: Bench, dtype: torch.dtype) -> Iterator[CheckRow]:
    for spans, places, longest in ((40, 6, 16),) if bench.dry else ((513, 51, 64), (2048, 204, 64)):
        exact = drawn.arrived(HEADS, spans, places, longest, DIM, dtype)
        ours, listed = drawn.copy_to(exact, bench.device.at), []
        for source in (ours, exact):
            results = arrivals(source.came, source.meta, places, DIM, dtype.itemsize)
            fill_cells(
                (source.new[0], source.new[1]), results.turn, source.span, source.offset, source.fill, *source.cells
            )
            listed.append(results)
        name = f"arrivals, {_named(dtype)}, {places} of {spans} spans"
        for subject, item, two in zip(
            (*Arrivals._fields, "cells"), (*listed[0], ours.cells), (*listed[1], exact.cells), strict=True
        ):
            yield same(f"{name}: {subject}", item, two)


def _tables(bench: Bench) -> Iterator[CheckRow]:
    for count, page, parts in (
        ((300, 32, True), (300, 1, True)) if bench.dry else ((3277, 32, True), (3277, 1, True), (140_000, 32, False))
    ):
        reads = drawn.slots_read(HEADS, GROUP, count, count // 16, parts)
        exact = slot_tables.slot_tables(reads, page)
        results = slot_tables.slot_tables(drawn.copy_to(reads, bench.device.at), page)
        name = f"slot tables, {count} slots, pages of {page}{', spans read in part' if parts else ''}"
        for subject, item, two in zip(
            ("table", "lengths", "counts", "bias", "rows"), results.tensors(), exact.tensors(), strict=True
        ):
            assert item is not None
            assert two is not None
            yield same(f"{name}: {subject}", item, two)
