"""Every kernel on the device against its float64 reference on random bf16 data.

What Triton's interpreter cannot show is shown here: bf16 and tf32 arithmetic, races, reads out of bounds in what a run
does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from kvlens.gpu.bench import drawn
from kvlens.gpu.bench.failures import sentence
from kvlens.gpu.bench.floors import PAGE
from kvlens.gpu.bench.part import Bench, Part
from kvlens.gpu.bench.result import CheckRow
from kvlens.kernels import (
    lowrank_spans,
    merge,
    page_attend,
    page_moves,
    page_scores,
    slot_tables,
    zone_plan,
    zone_torch,
)
from kvlens.kernels.arrivals import Arrivals, arrivals, fill_cells
from kvlens.kernels.lowrank_spans import Spans
from kvlens.kernels.page_attend import Pages

TOLERANCE = 1e-2
MASS = 1e-3
"""a masses' sum may differ from 1 by this"""
HEADS, GROUP, DIM = 8, 4, 128


def measure(bench: Bench) -> Iterator[CheckRow]:
    """A kernel that cannot be run is a failed check, and the others go on."""
    torch.manual_seed(0)
    for check in (_attend, _merge, _scores, _spans, _moves, _zones, _arrived, _tables):
        try:
            yield from check(bench)
        except Exception as problem:
            if not bench.device.alive():
                raise
            name = check.__name__.strip("_")
            yield CheckRow(f"{name}: {sentence(problem, 'free memory of the device')[0]}", -1.0, 0.0, False)


def _near(name: str, found: torch.Tensor, exact: torch.Tensor, tolerance: float = TOLERANCE) -> CheckRow:
    """Norm of the difference over the norm of the exact result; not finite counts as failed."""
    wide = found.double().cpu()
    error = float((wide - exact).norm() / exact.norm())
    return CheckRow(name, error if error == error else -1.0, tolerance, error <= tolerance)


def _same(name: str, found: torch.Tensor, exact: torch.Tensor) -> CheckRow:
    wrong = float((found.cpu() != exact.cpu()).double().mean())
    return CheckRow(f"{name}, bit for bit", wrong, 0.0, wrong == 0)


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.double().cpu() for tensor in tensors]


def _attend(bench: Bench) -> Iterator[CheckRow]:
    for batch, places, biased in (
        ((1, 7, True), (2, 33, True), (1, 33, False)) if bench.dry else ((1, 7, True), (2, 102, True), (1, 1024, False))
    ):
        q, keys, values, pages = drawn.ragged_pages(bench, (HEADS, GROUP, DIM), batch, places, biased)
        found = page_attend.page_attention(q, keys, values, pages, DIM**-0.5)
        tables = [
            x.cpu() if x is not None else None
            for x in (pages.table, pages.page_len, pages.n_page, pages.bias, pages.bias_row)
        ]
        exact = page_attend.page_attention(*_wide(q, keys, values), Pages(*tables), DIM**-0.5)  # type: ignore[arg-type]
        assert found.mass is not None
        assert exact.mass is not None
        name = f"k1, batch {batch}, {places} pages{', bias' if biased else ''}"
        yield _near(f"{name}: output", found.output, exact.output)
        yield _near(f"{name}: LSE", found.lse, exact.lse)
        yield _near(f"{name}: masses", found.mass, exact.mass)
        gap = float((found.mass.double().sum(-1) - 1).abs().max())
        yield CheckRow(f"{name}: masses add up to 1", gap, MASS, gap <= MASS)


def _merge(bench: Bench) -> Iterator[CheckRow]:
    parts, lses = torch.randn(2, 32, 17, DIM), torch.randn(2, 32, 17) * 5
    lses[0, 0, 3] = -torch.inf
    parts[0, 0, 3] = 0
    found, lse = merge.merge(parts.to(bench.device.at), lses.to(bench.device.at), torch.bfloat16)
    exact, exact_lse = merge.merge(parts.double(), lses.double(), torch.float64)
    yield _near("merge: output", found, exact)
    yield _near("merge: LSE", lse, exact_lse)


def _scores(bench: Bench) -> Iterator[CheckRow]:
    places, live = (70, 66) if bench.dry else (1024, 1000)
    q, one, two = (bench.device.normal(*shape) for shape in ((1, HEADS * GROUP, DIM), *[(1, HEADS, places, DIM)] * 2))
    lo, hi = torch.minimum(one, two), torch.maximum(one, two)
    there = (torch.arange(places, device=bench.device.at) < live).expand(1, HEADS, -1)
    for pooling in page_scores.POOLINGS:
        scaling = DIM**-0.5
        found = page_scores.page_scores(q, lo, hi, there, pooling, scaling)[..., :live]
        exact = page_scores.page_scores(*_wide(q, lo, hi), there.cpu(), pooling, scaling)[..., :live]
        yield _near(f"k2 {pooling}", found, exact)


def _spans(bench: Bench) -> Iterator[CheckRow]:
    kv_heads, places, at = 2, 3, bench.device.at
    meta, flat, start = torch.zeros(1, kv_heads, places, 4, dtype=torch.int64), [], 0
    for place, (n, rank_k, rank_v) in enumerate(
        ((64, 16, 16), (37, 5, 12), (0, 0, 0), (128, 32, 7), (20, 1, 32), (64, 32, 32))
    ):
        meta.view(-1, 4)[place] = torch.tensor((start, n, rank_k, rank_v))
        size = (rank_k + rank_v) * (n + DIM + 1)
        flat.append(torch.randn(size) * 0.5)
        start += size
    buffer = torch.cat(flat).bfloat16()
    spans, exact_spans = Spans(buffer.to(at), meta.to(at), 32), Spans(buffer.double(), meta, 32)
    q = bench.device.normal(1, kv_heads * GROUP, DIM)
    reads = torch.rand(1, kv_heads * GROUP, places) < 0.7
    parts, lses = lowrank_spans.attend(q, spans, reads.to(at), DIM**-0.5)
    exact, exact_lses = lowrank_spans.attend(q.double().cpu(), exact_spans, reads, DIM**-0.5)
    read = exact_lses > -torch.inf
    yield _near("k3 attend: parts", parts, exact)
    yield _near("k3 attend: LSE", lses.cpu()[read], exact_lses[read])
    tiles = torch.tensor(
        [(place, first, i) for i, (place, first) in enumerate(((0, 0), (0, 32), (1, 0), (1, 32), (3, 96), (5, 32)))]
    )
    slots = [
        torch.zeros(8, PAGE, kv_heads, DIM, dtype=dtype)
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float64, torch.float64)
    ]
    views = [slot.transpose(1, 2) for slot in (slots[0].to(at), slots[1].to(at), slots[2], slots[3])]
    lowrank_spans.reconstruct(spans, tiles.to(at), views[0], views[1])
    lowrank_spans.reconstruct(exact_spans, tiles, views[2], views[3])
    yield _near("k3 reconstruct: keys", views[0], views[2])
    yield _near("k3 reconstruct: values", views[1], views[3])


def _moves(bench: Bench) -> Iterator[CheckRow]:
    kv, count = bench.model.kv, 16 if bench.dry else 512
    pool = bench.device.pinned(256, kv.kv_heads, 2, PAGE, kv.head_dim)
    pool.copy_(bench.device.normal(*pool.shape))
    heads = torch.arange(count) % kv.kv_heads
    unit = (torch.randperm(256).repeat(2)[:count] * kv.kv_heads + heads).int()
    unit[3] = -1
    slot = (torch.arange(count) // kv.kv_heads).int()
    keys, values = (
        torch.zeros(count, PAGE, kv.kv_heads, kv.head_dim, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)
    )
    moved = [x.to(bench.device.at) for x in (unit, slot)]
    there = [x.to(bench.device.at) for x in (keys, values)]
    page_moves.gather(pool, *moved, *there)
    page_moves.gather_torch(pool, unit, slot, keys, values)
    bench.device.wait()
    yield _same("k4 gather: keys", there[0], keys)
    yield _same("k4 gather: values", there[1], values)
    first = unit[: min(count, 256)]  # no unit twice: two moves into one race
    back = bench.device.pinned(*pool.shape).zero_()
    expected = torch.zeros(pool.shape, dtype=torch.bfloat16)
    page_moves.offload(back, moved[0][: len(first)], moved[1][: len(first)], *there)
    page_moves.offload_torch(expected, first, slot[: len(first)], keys, values)
    bench.device.wait()
    yield _same("k4 offload", back, expected)


def _zones(bench: Bench) -> Iterator[CheckRow]:
    for zone in drawn.SMALL_ZONES if bench.dry else drawn.ZONES:
        reference = drawn.zone_tables(zone, HEADS)
        ours = [drawn.there(value, bench.device.at) for value in reference]
        equal = True
        for step in range(1, 9):
            wishes = drawn.zone_wishes(zone, HEADS, GROUP, step, 0.8)
            found = zone_plan.zone_plan(ours[0], ours[1], drawn.there(wishes, bench.device.at), ours[2])
            exact = zone_torch.zone_plan_torch(*reference[:2], wishes, reference[2])
            for tables in (ours[0], reference[0]):
                tables.stamp[:, 0] = (
                    0  # of the span that nobody wishes for: the torch plan writes there what belongs to none
                )
            both = zip((found, *ours[:2]), (exact, *reference[:2]), strict=True)
            pairs = [
                pair
                for one, two in both
                for pair in zip(dataclasses.astuple(one), dataclasses.astuple(two), strict=True)
            ]
            equal = equal and all(
                torch.equal(one.cpu(), two) if isinstance(two, torch.Tensor) else one == two for one, two in pairs
            )
        name = (
            f"zone plan, {zone.name}: {zone.wishes} wishes, {zone.cells} cells, {zone.spans} spans, 8 "
            f"steps, bit for bit"
        )
        yield CheckRow(name, float(not equal), 0.0, equal)


def _arrived(bench: Bench) -> Iterator[CheckRow]:
    for spans, places, longest in ((40, 6, 16),) if bench.dry else ((513, 51, 64), (2048, 204, 64)):
        exact = drawn.arrived(HEADS, spans, places, longest, DIM)
        ours, listed = drawn.there(exact, bench.device.at), []
        for given in (ours, exact):
            found = arrivals(given.came, given.meta, places, DIM, drawn.ITEM)
            fill_cells((given.new[0], given.new[1]), found.turn, given.span, given.offset, given.fill, *given.cells)
            listed.append(found)
        name = f"arrivals, {places} of {spans} spans"
        for what, one, two in zip(
            (*Arrivals._fields, "cells"), (*listed[0], ours.cells), (*listed[1], exact.cells), strict=True
        ):
            yield _same(f"{name}: {what}", one, two)


def _tables(bench: Bench) -> Iterator[CheckRow]:
    for count, page, parts in (
        ((300, 32, True), (300, 1, True)) if bench.dry else ((3277, 32, True), (3277, 1, True), (140_000, 32, False))
    ):
        reads = drawn.slots_read(HEADS, GROUP, count, count // 16, parts)
        exact = slot_tables.slot_tables(reads, page)
        found = slot_tables.slot_tables(drawn.there(reads, bench.device.at), page)
        name = f"slot tables, {count} slots, pages of {page}{', spans read in part' if parts else ''}"
        for what, one, two in zip(
            ("table", "lengths", "counts", "bias", "rows"), found.tensors(), exact.tensors(), strict=True
        ):
            assert one is not None
            assert two is not None
            yield _same(f"{name}: {what}", one, two)


PART = Part("checks", measure, ("kernel_checks.py", "drawn.py"), "free the device's memory; this part takes about 1 GB")
