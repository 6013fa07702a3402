"""Spans that a static step has reconstructed from factors: which of them came, and their tokens' way into the cells of
a recall zone.

The zone plan (zone_plan.py) flags spans and cells. `arrivals` lists the spans, as k3 (lowrank_spans.py)
takes them, and counts their bytes; k3 reconstructs each into a place of its own; `fill_cells` copies the tokens from
there to the cells. A launch each. Shapes: H KV heads, S span ids, A places for spans of one KV head, T tokens of a
place, M cells (tokens) of the zone, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, power_of_two, tl

BLOCK = 1024
"""spans, or places, taken at a time"""
CELLS = 16
"""cells that a program fills"""


class Arrivals(NamedTuple):
    """tiles int64 [H A, 3]: as k3's `reconstruct` takes them, the A places of a KV head one after the other: (KV head,
    span) as one number or -1, token 0, the place; turn int64 [H, S]: place of each span that came; bytes int64 [H]: of
    the units that came."""

    tiles: torch.Tensor
    turn: torch.Tensor
    bytes: torch.Tensor


def arrivals(came: torch.Tensor, meta: torch.Tensor, places: int, head_dim: int, itemsize: int) -> Arrivals:
    """List what came, in ascending order of span ids. came bool [H, S], at most `places` of a head; meta int64 [H, S,
    4]: as k3's `Spans` has units, whose numbers have `itemsize` bytes. CUDA tensors take Triton, others PyTorch."""
    return (arrivals_triton if backend(came) == "triton" else arrivals_torch)(came, meta, places, head_dim, itemsize)


def arrivals_torch(came: torch.Tensor, meta: torch.Tensor, places: int, head_dim: int, itemsize: int) -> Arrivals:
    """The reference; the kernel equals it bit for bit."""
    heads, spans = came.shape
    turn = came.cumsum(1) - 1
    unit = torch.arange(heads * spans, device=came.device).view(heads, spans)
    unit = torch.full((heads, places + 1), -1, device=came.device).scatter(
        1, torch.where(came, turn, places), torch.where(came, unit, -1)
    )[:, :places]
    place = torch.arange(places, device=came.device).expand(heads, places)
    _, tokens, rank_k, rank_v = meta.unbind(-1)
    numbers = torch.where(came, (rank_k + rank_v) * (tokens + head_dim + 1), 0).sum(1)
    return Arrivals(torch.stack((unit, torch.zeros_like(unit), place), -1).flatten(0, 1), turn, numbers * itemsize)


def arrivals_triton(came: torch.Tensor, meta: torch.Tensor, places: int, head_dim: int, itemsize: int) -> Arrivals:
    return Arrivals(*_arrivals(came, meta, places, head_dim, itemsize))


# Custom operators, so that torch.compile takes each as one call.
@torch.library.custom_op("kvlens::arrivals", mutates_args=())
def _arrivals(
    came: torch.Tensor, meta: torch.Tensor, places: int, head_dim: int, itemsize: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, spans = came.shape
    assert came.is_contiguous()
    assert meta.is_contiguous()
    listed = tiles, turn, total = _lists(meta, places)
    _list[(heads,)](
        came.view(torch.uint8),
        meta,
        tiles,
        turn,
        total,
        spans,
        places,
        head_dim + 1,
        itemsize,
        B=BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return listed


@_arrivals.register_fake
def _(
    came: torch.Tensor, meta: torch.Tensor, places: int, head_dim: int, itemsize: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _lists(meta, places)


def _lists(meta: torch.Tensor, places: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, spans, _ = meta.shape
    return meta.new_empty(heads * places, 3), meta.new_empty(heads, spans), meta.new_empty(heads)


def fill_cells(
    new: tuple[torch.Tensor, torch.Tensor],
    turn: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    fill: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write keys, values [H, M, D] where `fill` bool [H, M] says so. new: keys and values [H, A, T, D] of the spans
    that came; turn: as `Arrivals` has it; span, offset int64 [H, M]: what lies in each cell. CUDA tensors take Triton,
    others PyTorch."""
    (fill_cells_triton if backend(keys) == "triton" else fill_cells_torch)(new, turn, span, offset, fill, keys, values)


def fill_cells_torch(
    new: tuple[torch.Tensor, torch.Tensor],
    turn: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    fill: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """The reference. Span ids have to be valid in cells that are not filled, too."""
    tokens, dim = new[0].shape[2:]
    source = torch.where(fill, turn.gather(1, span) * tokens + offset, 0)[..., None].expand(-1, -1, dim)
    for target, rows in zip((keys, values), new, strict=True):
        target.copy_(torch.where(fill[..., None], rows.flatten(1, 2).gather(1, source), target))


def fill_cells_triton(
    new: tuple[torch.Tensor, torch.Tensor],
    turn: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    fill: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Any strides of `new`, keys and values, but 1 in the last dimension. Span ids of cells that are not filled are no
    addresses."""
    _fill_cells(*new, turn, span, offset, fill, keys, values)


@torch.library.custom_op("kvlens::fill_cells", mutates_args=("keys", "values"))
def _fill_cells(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    turn: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    fill: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    heads, cells, dim = keys.shape
    power_of_two(head_dim=dim)
    assert all(x.is_contiguous() for x in (turn, span, offset, fill))
    assert all(x.stride(-1) == 1 and x.dtype == keys.dtype for x in (new_keys, new_values, keys, values))
    _fill[(-(-cells // CELLS), heads)](
        new_keys,
        new_values,
        turn,
        span,
        offset,
        fill.view(torch.uint8),
        keys,
        values,
        *new_keys.stride()[:3],
        *new_values.stride()[:3],
        *keys.stride()[:2],
        *values.stride()[:2],
        turn.shape[1],
        cells,
        B=CELLS,
        D=dim,
        num_warps=4,
        enable_fp_fusion=True,
    )


@_fill_cells.register_fake
def _(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    turn: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    fill: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    return None


@jit
def _list(  # type: ignore[no-untyped-def]
    came_ptr, meta_ptr, tile_ptr, turn_ptr, bytes_ptr, S, A, WIDE, ITEM, B: tl.constexpr
):
    """One program: the spans of a KV head, B at a time, then the places that none took. WIDE: numbers that a rank takes
    beside U."""
    h = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, B)
    earlier = tl.full((), 0, tl.int32)
    numbers = tl.full((), 0, tl.int64)
    for start in range(0, S, B):
        s = start + block
        came = tl.load(came_ptr + h * S + s, mask=s < S, other=0).to(tl.int32)
        turn = earlier + tl.cumsum(came, 0) - 1
        earlier += tl.sum(came, 0)
        tl.store(turn_ptr + h * S + s, turn.to(tl.int64), mask=s < S)
        listed = (came != 0) & (turn < A)
        tile = tile_ptr + (h * A + turn) * 3
        tl.store(tile, h * S + s, mask=listed)
        tl.store(tile + 1, tl.zeros((B,), tl.int64), mask=listed)
        tl.store(tile + 2, turn.to(tl.int64), mask=listed)
        unit = meta_ptr + (h * S + s) * 4
        tokens = tl.load(unit + 1, mask=came != 0, other=0)
        ranks = tl.load(unit + 2, mask=came != 0, other=0) + tl.load(unit + 3, mask=came != 0, other=0)
        numbers += tl.sum(ranks * (tokens + WIDE), 0)
    tl.store(bytes_ptr + h, numbers * ITEM)
    for start in range(0, A, B):
        place = start + block
        rest = (place >= earlier) & (place < A)
        tile = tile_ptr + (h * A + place) * 3
        tl.store(tile, tl.full((B,), -1, tl.int64), mask=rest)
        tl.store(tile + 1, tl.zeros((B,), tl.int64), mask=rest)
        tl.store(tile + 2, place.to(tl.int64), mask=rest)


@jit
def _fill(  # type: ignore[no-untyped-def]
    new_k_ptr,
    new_v_ptr,
    turn_ptr,
    span_ptr,
    offset_ptr,
    fill_ptr,
    k_ptr,
    v_ptr,
    new_k_h,
    new_k_a,
    new_k_t,
    new_v_h,
    new_v_a,
    new_v_t,
    k_h,
    k_t,
    v_h,
    v_t,
    S,
    M,
    B: tl.constexpr,
    D: tl.constexpr,
):
    """One program: B cells of a KV head, keys and values. Both are read before either is written: more bytes under way
    at once."""
    h = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * B + tl.arange(0, B)
    d = tl.arange(0, D)
    fill = tl.load(fill_ptr + h * M + m, mask=m < M, other=0) != 0
    # only these cells' span ids are addresses
    span = tl.load(span_ptr + h * M + m, mask=fill, other=0)
    offset = tl.load(offset_ptr + h * M + m, mask=fill, other=0)
    turn = tl.load(turn_ptr + h * S + span, mask=fill, other=0)
    new_k = new_k_ptr + h * new_k_h + (turn * new_k_a + offset * new_k_t)[:, None] + d[None, :]
    new_v = new_v_ptr + h * new_v_h + (turn * new_v_a + offset * new_v_t)[:, None] + d[None, :]
    cell = m.to(tl.int64)[:, None]
    k = tl.load(new_k, mask=fill[:, None])
    v = tl.load(new_v, mask=fill[:, None])
    tl.store(k_ptr + h * k_h + cell * k_t + d[None, :], k, mask=fill[:, None])
    tl.store(v_ptr + h * v_h + cell * v_t + d[None, :], v, mask=fill[:, None])
