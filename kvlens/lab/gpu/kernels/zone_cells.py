"""The cells of a recall zone once it is decided what stays (zone_kernel.py): what each cell holds from now on, what is
to be moved into it, and what its slots are called.

Few cells are the plan's own last part. Many are two launches behind it, of a program for every block of cells: the
first counts free cells, since a cell's place among the free ones depends on those before it. h: the KV head; shapes as
there.
"""

from __future__ import annotations

from kvlens.kernels.compat import jit, tl


@jit
def free_cells(  # type: ignore[no-untyped-def]
    kept_ptr, span_ptr, offset_ptr, live_ptr, h, start, S, M, BC: tl.constexpr
):
    """Of BC cells from `start` on: what they hold (span, offset), which stay, and which are free (int32)."""
    cell = start + tl.arange(0, BC)
    inside = cell < M
    address = h * M + cell
    live = tl.load(live_ptr + address, mask=inside, other=0)
    span = tl.load(span_ptr + address, mask=inside, other=0)
    offset = tl.load(offset_ptr + address, mask=inside, other=0)
    kept_cells = tl.load(kept_ptr + h * S + span, mask=live != 0, other=0)
    stays = (live != 0) & (offset < kept_cells)
    return span, offset, stays, (inside & (stays.to(tl.int32) == 0)).to(tl.int32)


@jit
def place_cells(  # type: ignore[no-untyped-def]
    want_ptr,
    starts_ptr,
    packed_ptr,
    span_ptr,
    offset_ptr,
    live_ptr,
    position_ptr,
    name_ptr,
    role_ptr,
    kept_ptr,
    ends_ptr,
    count_ptr,
    unit_ptr,
    rebuilt_ptr,
    came_ptr,
    h,
    start,
    free_before,
    total,
    packed_h,
    packed_s,
    slots_h,
    origin,
    W,
    S,
    M,
    H: tl.constexpr,
    P: tl.constexpr,
    FACTORS: tl.constexpr,
    RAW: tl.constexpr,
    FACTORED: tl.constexpr,
    FREE: tl.constexpr,
    STEPS: tl.constexpr,
    BC: tl.constexpr,
    PP: tl.constexpr,
):
    """Fill the free ones of BC cells from `start` on, before which `free_before` cells are free and of which `total`
    are wanted -> cells that rows of the pool fill."""
    page = tl.arange(0, PP)
    cell = start + tl.arange(0, BC)
    inside = cell < M
    address = h * M + cell
    span, offset, stays, free = free_cells(kept_ptr, span_ptr, offset_ptr, live_ptr, h, start, S, M, BC)
    rank = free_before + tl.cumsum(free, 0) - 1
    fill = (free != 0) & (rank < total)
    if free_before < total:
        # the first wish whose last missing cell comes after this one
        low = tl.full((BC,), 0, tl.int32)
        high = low + W
        for _ in range(STEPS):
            middle = (low + high) // 2
            behind = tl.load(ends_ptr + h * W + middle, mask=fill & (middle < W), other=0x7FFFFFFF) <= rank
            low = tl.where(behind, middle + 1, low)
            high = tl.where(behind, high, middle)
        wish = h * W + low
        span = tl.where(fill, tl.load(want_ptr + wish, mask=fill, other=0), span)
        into = tl.load(count_ptr + wish, mask=fill, other=0) - tl.load(ends_ptr + wish, mask=fill, other=0) + rank
        offset = tl.where(fill, into.to(tl.int64), offset)
    lives = stays | fill
    packed = tl.full((BC,), 0, tl.int64)
    if FACTORS:
        packed = tl.load(packed_ptr + h * packed_h + span * packed_s, mask=lives, other=0)
    span_start = tl.load(starts_ptr + span, mask=fill, other=0).to(tl.int64)
    raw = fill & (packed <= 0)
    row = (span_start - origin) // P + offset
    role = tl.where(lives, tl.where(packed > 0, FACTORED, RAW), FREE)
    slot = h * slots_h + cell[:, None] * P + page[None, :]
    named = inside[:, None] & (page < P)[None, :]
    new = fill[:, None] & (page < P)[None, :]
    tl.debug_barrier()
    tl.store(span_ptr + address, span, mask=fill)
    tl.store(offset_ptr + address, offset, mask=fill)
    tl.store(live_ptr + address, lives.to(tl.uint8), mask=inside)
    tl.store(unit_ptr + address, tl.where(raw, row * H + h, -1).to(tl.int32), mask=inside)
    if FACTORS:
        tl.store(rebuilt_ptr + address, (fill & (packed > 0)).to(tl.uint8), mask=inside)
        tl.store(came_ptr + h * S + span, (fill & (packed > 0)).to(tl.uint8), mask=fill & (packed > 0))
    tl.store(position_ptr + slot, ((span_start + offset * P)[:, None] + page[None, :]).to(tl.int32), mask=new)
    tl.store(name_ptr + slot, tl.broadcast_to(span.to(tl.int32)[:, None], (BC, PP)), mask=new)
    tl.store(role_ptr + slot, tl.broadcast_to(role.to(tl.uint8)[:, None], (BC, PP)), mask=named)
    return tl.sum(raw.to(tl.int64), 0)


@jit
def count_free(  # type: ignore[no-untyped-def]
    kept_ptr, span_ptr, offset_ptr, live_ptr, freed_ptr, S, M, BC: tl.constexpr
):
    """One program: the free cells of a block, into freed [H, blocks]."""
    h = tl.program_id(1)
    _, _, _, free = free_cells(kept_ptr, span_ptr, offset_ptr, live_ptr, h, tl.program_id(0) * BC, S, M, BC)
    tl.store(freed_ptr + h * tl.num_programs(0) + tl.program_id(0), tl.sum(free, 0))


@jit
def fill_blocks(  # type: ignore[no-untyped-def]
    want_ptr,
    starts_ptr,
    packed_ptr,
    span_ptr,
    offset_ptr,
    live_ptr,
    position_ptr,
    name_ptr,
    role_ptr,
    kept_ptr,
    ends_ptr,
    count_ptr,
    unit_ptr,
    rebuilt_ptr,
    came_ptr,
    moved_ptr,
    freed_ptr,
    total_ptr,
    packed_h,
    packed_s,
    slots_h,
    origin,
    unit_bytes,
    W,
    S,
    M,
    H: tl.constexpr,
    P: tl.constexpr,
    FACTORS: tl.constexpr,
    RAW: tl.constexpr,
    FACTORED: tl.constexpr,
    FREE: tl.constexpr,
    STEPS: tl.constexpr,
    BC: tl.constexpr,
    PP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program: a block of cells. Bytes are added up over the blocks; whole numbers, so in any order."""
    h = tl.program_id(1)
    blocks = tl.num_programs(0)
    earlier = tl.arange(0, BLOCKS)
    freed = tl.load(freed_ptr + h * blocks + earlier, mask=earlier < tl.program_id(0), other=0)
    raw = place_cells(
        want_ptr,
        starts_ptr,
        packed_ptr,
        span_ptr,
        offset_ptr,
        live_ptr,
        position_ptr,
        name_ptr,
        role_ptr,
        kept_ptr,
        ends_ptr,
        count_ptr,
        unit_ptr,
        rebuilt_ptr,
        came_ptr,
        h,
        tl.program_id(0) * BC,
        tl.sum(freed, 0),
        tl.load(total_ptr + h),
        packed_h,
        packed_s,
        slots_h,
        origin,
        W,
        S,
        M,
        H,
        P,
        FACTORS,
        RAW,
        FACTORED,
        FREE,
        STEPS,
        BC,
        PP,
    )
    tl.atomic_add(moved_ptr + h, raw * unit_bytes)
