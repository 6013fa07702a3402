"""The launches that are compiled ahead of time: every kernel, through the launcher that runs it, at the settings it
ships with.

The tensors are small and empty: what a launch compiles to depends on types, head size, page size, group and the
divisibility of strides, not on how much there is. An 8B model with 8 KV heads of 4 query heads stands for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import cast

import torch

from kvlens.kernels.best_rows import best_rows_triton
from kvlens.kernels.chunk_reads import chunk_reads_triton
from kvlens.kernels.page_attend import Pages, page_attention_triton
from kvlens.kernels.page_scores import Pooling, page_scores_triton
from kvlens.kernels.pool_attend import pool_attention
from kvlens.kernels.slot_tables import Codes, SlotReads, slot_tables_triton
from kvlens.kernels.span_routes import POOLS, RouteTable, routed_triton
from kvlens.kernels.token_gather import gather_tokens_triton
from kvlens.kernels.turned_reads import turned_reads_triton
from kvlens.kernels.zone_tables import Names, Source, Wishes, ZoneTables
from kvlens.lab.gpu.kernels.arrivals import arrivals_triton, fill_cells_triton
from kvlens.lab.gpu.kernels.lowrank_spans import Spans, attend_triton, reconstruct_triton
from kvlens.lab.gpu.kernels.matvec import Around, matvec_triton
from kvlens.lab.gpu.kernels.page_moves import move_triton
from kvlens.lab.gpu.kernels.rotary_write import Places, rotary_write_triton
from kvlens.lab.gpu.kernels.zone_plan import zone_plan_triton

Case = tuple[str, Callable[[], object]]
"""What is compiled, in words, and the launch."""

HEADS, GROUP, PLACES, SLOTS = 8, 4, 64, 16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def cases() -> Iterator[Case]:
    for dim, page, dtype, full in (
        (32, 32, BF16, True),
        (64, 32, BF16, True),
        (128, 32, BF16, True),
        (256, 32, BF16, True),
        (128, 16, BF16, True),
        (128, 64, BF16, True),
        (256, 64, BF16, True),
        (128, 32, FP16, True),
        (128, 32, BF16, False),
        (128, 32, FP32, True),
        (256, 32, FP32, True),
    ):
        extras = "bias, mass" if full else "bare"
        yield (f"D {dim}, page {page}, {_name(dtype)}, {extras}", partial(_attend, dim, page, dtype, full))
    for dim, dtype in ((64, BF16), (128, BF16), (256, BF16), (128, FP16), (64, FP32), (128, FP32)):
        yield f"D {dim}, pool of slots, {_name(dtype)}, bias", lambda d=dim, t=dtype: _pool(d, t)  # type: ignore[misc]
    for dim, dtype, pooling in (
        (128, BF16, "MeanS"),
        (128, BF16, "MaxQ"),
        (128, BF16, "MeanQK"),
        (256, BF16, "MaxS"),
        (128, FP16, "MeanS"),
        (128, FP32, "MeanS"),
    ):
        yield f"D {dim}, {_name(dtype)}, {pooling}", lambda d=dim, t=dtype, p=pooling: _score(d, t, cast(Pooling, p))  # type: ignore[misc]
    for dim, rank, dtype in ((128, 32, BF16), (256, 64, BF16), (128, 32, FP32)):
        yield (f"D {dim}, rank to {rank}, page 32, {_name(dtype)}"), lambda d=dim, r=rank, t=dtype: _lowrank(d, r, t)  # type: ignore[misc]
    for dim, page in ((128, 1), (128, 32), (256, 64)):
        for to_pool in (False, True):
            way = "offload" if to_pool else "gather"
            yield f"{way}, D {dim}, page {page}, bf16", lambda d=dim, p=page, to=to_pool: _move(d, p, to)  # type: ignore[misc]
    for page in (1, 32):
        yield f"gather in order, D 128, page {page}, bf16", lambda p=page: _move(128, p, False, ordered=True)  # type: ignore[misc]
    for dim, dtype in ((64, FP16), (128, BF16), (256, BF16), (64, FP32)):
        for behind in (1, 32):
            name = "side by side" if behind == 1 else "apart"
            yield (
                f"scattered tokens, keys and values {name}, D {dim}, {_name(dtype)}",
                partial(_gather, dim, dtype, behind),
            )
    for name, page, wishes, cells, variant in (
        ("pages of 32", 32, 32, 32, ""),
        ("pages of 32, nothing reused", 32, 32, 32, "anew"),
        ("tokens, factors", 1, 2000, 6553, "factors"),
        ("tokens, parts", 1, 818, 13107, "parts"),
        ("tokens, parts, equal reuse", 1, 818, 13107, "equal"),
    ):
        yield f"zone of {name}", lambda p=page, w=wishes, m=cells, x=variant: _zone(p, w, m, x)  # type: ignore[misc]
    for dim, dtype in ((128, BF16), (256, BF16), (128, FP16), (128, FP32)):
        yield f"D {dim}, spans that came, {_name(dtype)}", lambda d=dim, t=dtype: _arrived(d, t)  # type: ignore[misc]
    for group, page, reads in (
        (4, 32, "whole spans"),
        (8, 32, "parts of spans"),
        (8, 1, "parts of spans"),
        (4, 32, "no selection"),
    ):
        yield f"G {group}, pages of {page}, {reads}", lambda g=group, p=page, r=reads: _tables(g, p, r)  # type: ignore[misc]

    for vectors, around in product((1, 8), ("norm", "add", "norm, gated")):
        yield f"{vectors} vectors of 4096, bf16, {around}", partial(_product, vectors, around)
    yield "D 128, bf16, one sequence", partial(_turn_and_write, 1)
    yield "D 128, bf16, 8 sequences", partial(_turn_and_write, 8)
    yield "rows of 4096", lambda: best_rows_triton(torch.empty(HEADS, 4096), 32)
    ids = torch.zeros(4096, dtype=torch.int64)
    yield "rows of 4096, by their names", lambda: best_rows_triton(torch.empty(HEADS, 4096), 4096, ids)
    order, quota = torch.zeros(HEADS, 4096, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    yield "tokens of 4096 chunks", lambda: chunk_reads_triton(order, ids, quota, 2)
    for pool, each_head in product(POOLS, (False, True)):
        yield (
            f"G 4, D 128, 32 to route by, {pool}{', own projections' if each_head else ''}",
            partial(_routes, pool, each_head),
        )
    yield "G 4, D 128, bf16, 32 wishes", _turned


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


def _slots(page: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Token-major slots, as the product keeps them."""
    return torch.empty(SLOTS, page, HEADS, dim, dtype=dtype).transpose(1, 2)


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _attend(dim: int, page: int, dtype: torch.dtype, full: bool) -> object:
    bias = (torch.empty(SLOTS, GROUP, page), _ints(1, HEADS, PLACES)) if full else (None, None)
    pages = Pages(_ints(1, HEADS, PLACES), _ints(1, HEADS, PLACES), _ints(1, HEADS), *bias)
    q = torch.empty(1, HEADS * GROUP, dim, dtype=dtype)
    return page_attention_triton(q, _slots(page, dim, dtype), _slots(page, dim, dtype), pages, dim**-0.5, mass=full)


def _pool(dim: int, dtype: torch.dtype) -> object:
    """As a session attends: 100 slots, so that the last page is short."""
    keys, q = torch.empty(HEADS, 100, dim, dtype=dtype), torch.empty(1, HEADS * GROUP, 1, dim, dtype=dtype)
    return pool_attention(q, keys, keys, torch.empty(HEADS, GROUP, 100), dim**-0.5)


def _score(dim: int, dtype: torch.dtype, pooling: Pooling) -> object:
    bounds, present = torch.empty(1, HEADS, PLACES, dim, dtype=dtype), torch.ones(PLACES, dtype=torch.bool)
    present = present.expand(1, HEADS, -1)
    return page_scores_triton(
        torch.empty(1, HEADS * GROUP, dim, dtype=dtype), bounds, bounds, present, pooling, dim**-0.5
    )


def _lowrank(dim: int, rank: int, dtype: torch.dtype) -> None:
    spans = Spans(torch.empty(1024, dtype=dtype), torch.zeros(1, HEADS, 32, 4, dtype=torch.int64), rank)
    reconstruct_triton(spans, torch.zeros(8, 3, dtype=torch.int64), _slots(32, dim, dtype), _slots(32, dim, dtype))
    reads = torch.zeros(1, HEADS * GROUP, 32, dtype=torch.bool)
    attend_triton(torch.empty(1, HEADS * GROUP, dim, dtype=dtype), spans, reads, dim**-0.5)


def _product(vectors: int, around: str) -> object:
    norm = torch.empty(4096, dtype=BF16) if "norm" in around else None
    add = torch.empty(vectors, 64, dtype=BF16) if "add" in around else None
    matrix = torch.empty(128 if "gated" in around else 64, 4096, dtype=BF16)
    return matvec_triton(torch.empty(vectors, 4096, dtype=BF16), matrix, Around(norm, 1e-5, "gated" in around, add))


def _turn_and_write(batch: int) -> object:
    slots, turn = torch.empty(HEADS, 64, 128, dtype=BF16), torch.empty(batch, 128, dtype=BF16)
    offsets = torch.zeros(batch, 2, dtype=torch.int64) if batch > 1 else None
    places = Places(slots, slots, torch.zeros(batch, HEADS, dtype=torch.int64), offsets)
    return rotary_write_triton(torch.empty(batch, (GROUP + 2) * HEADS * 128, dtype=BF16), turn, turn, places)


def _turned() -> object:
    q, wishes = torch.empty(HEADS * GROUP, 128, dtype=BF16), torch.zeros(HEADS, 32, dtype=torch.int64)
    return turned_reads_triton(q, wishes, q.clone(), wishes.clone(), 4098, 0.8, "mean")


def _routes(pool: str, each_head: bool) -> object:
    weight = torch.empty(HEADS * (GROUP if each_head else 1), 32, 128)
    summary, ids = torch.empty(HEADS * GROUP, 513, 32, dtype=BF16), torch.zeros(513, dtype=torch.int64)
    table = RouteTable(weight, summary, torch.empty(513), ids, torch.empty(HEADS * GROUP))
    return routed_triton(torch.empty(HEADS * GROUP, 128, dtype=BF16), table, HEADS, 514, pool)


def _gather(dim: int, dtype: torch.dtype, behind: int) -> None:
    """Into token-major slots of a layer."""
    slots = torch.empty(100, HEADS, dim, dtype=dtype).transpose(0, 1)
    gather_tokens_triton(torch.empty(64, dim, dtype=dtype), behind, torch.zeros(3, 40, dtype=torch.int64), slots, slots)


def _move(dim: int, page: int, to_pool: bool, ordered: bool = False) -> None:
    pool, moves = torch.empty(4, HEADS, 2, page, dim, dtype=BF16), _ints(HEADS, 32)
    move_triton(pool, moves, None if ordered else moves, _slots(page, dim, BF16), _slots(page, dim, BF16), to_pool)


def _tables(group: int, page: int, reads: str) -> object:
    """As a static step's layer: 3,000 slots."""
    spans, (span, position) = 300, _ints(2, HEADS, 3000)
    fine = None if reads == "no selection" else torch.zeros(HEADS, group, spans, dtype=torch.bool)
    tokens = torch.zeros(HEADS, group, spans, dtype=torch.int64) if reads == "parts of spans" else None
    selectable, is_hot = (torch.zeros(*size, dtype=torch.bool) for size in ((spans,), (HEADS, spans)))
    return slot_tables_triton(
        SlotReads(
            torch.zeros(HEADS, 3000, dtype=torch.uint8),
            span,
            position,
            torch.zeros(spans),
            _ints(spans),
            selectable,
            is_hot,
            group,
            Codes(4, 3, 5, 6),
            fine,
            tokens,
        ),
        page,
    )


def _zone(page: int, wishes: int, cells: int, variant: str) -> object:
    """A zone in the midst of a layer's slots."""
    spans, slots = 4112 if page > 1 else 8197, cells * page + 1000

    def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(HEADS, *size, dtype=dtype)

    position, name, role = (zeros(slots, dtype=dtype)[:, 500:-500] for dtype in (torch.int32, torch.int32, torch.uint8))
    fire, is_hot = (zeros(*size, dtype=torch.bool) for size in ((), (spans,)))
    read = zeros(GROUP, spans) if variant in ("parts", "equal") else None
    packed = zeros(spans, 4)[..., 1] if variant == "factors" else None
    return zone_plan_triton(
        ZoneTables.empty(HEADS, spans, cells),
        Names(position, name, role, is_hot, (0, 1, 2)),
        Wishes(zeros(wishes), read, fire, torch.zeros((), dtype=torch.int64), 1, variant != "anew", variant == "equal"),
        Source(torch.zeros(spans), _ints(spans), packed, page, 512, 1 << 14),
    )


def _arrived(dim: int, dtype: torch.dtype) -> None:
    """As at 32K: room for 51 spans of 64 tokens, in the midst of a layer's token-major slots."""
    came, meta = torch.zeros(HEADS, 513, dtype=torch.bool), torch.zeros(HEADS, 513, 4, dtype=torch.int64)
    listed = arrivals_triton(came, meta, 51, dim, dtype.itemsize)
    scratch = torch.empty(51, HEADS, 64, dim, dtype=dtype).transpose(0, 1)
    slots = torch.empty(4000, HEADS, dim, dtype=dtype).transpose(0, 1)[:, 500:-236]
    span = torch.zeros(HEADS, slots.shape[1], dtype=torch.int64)
    fill_cells_triton(
        (scratch, scratch), listed.turn, span, span, torch.zeros_like(span, dtype=torch.bool), slots, slots
    )
