"""The kernel of zone_plan.py: the plan of one KV head, in one program.

It goes through wishes and spans a block at a time, so none of their numbers is bounded, and nothing is sorted: held
spans were wished for at different times, so those that give way are the ones up to one time, which is searched for.
Cells are zone_cells.py's. Shapes: W wishes, S span ids, M cells of P tokens, G query heads of a KV head
(kernels/zone_tables.py).
"""

from __future__ import annotations

from kvlens.kernels.compat import jit, tl
from kvlens.lab.gpu.kernels.zone_cells import place_cells
from kvlens.lab.gpu.kernels.zone_parts import accepted, oldest


@jit
def plan_zone(  # type: ignore[no-untyped-def]
    want_ptr,
    read_ptr,
    lengths_ptr,
    fire_ptr,
    held_ptr,
    there_ptr,
    starts_ptr,
    packed_ptr,
    clock_ptr,
    stamp_ptr,
    span_ptr,
    offset_ptr,
    live_ptr,
    position_ptr,
    name_ptr,
    role_ptr,
    hot_ptr,
    kept_ptr,
    total_ptr,
    ends_ptr,
    count_ptr,
    unit_ptr,
    moved_ptr,
    rebuilt_ptr,
    came_ptr,
    packed_h,
    packed_s,
    slots_h,
    origin,
    unit_bytes,
    W,
    S,
    M,
    G,
    R,
    H: tl.constexpr,
    HP: tl.constexpr,
    P: tl.constexpr,
    READ: tl.constexpr,
    REUSE: tl.constexpr,
    FACTORS: tl.constexpr,
    RAW: tl.constexpr,
    FACTORED: tl.constexpr,
    FREE: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
    BC: tl.constexpr,
    PP: tl.constexpr,
    T: tl.constexpr,
    CELLS: tl.constexpr,
):
    """One program per KV head. REUSE: 0 nothing stays, 1 all, 2 as much as `there` says of the KV head that can reuse
    fewest. CELLS: all cells are one block, which it fills itself. kept int32 [H, S]: cells of each span that stay;
    total int32 [H]: cells that are wanted.

    While it runs, -1 - n in `held` marks a span that is wished for and keeps n cells. Barriers stand where a thread
    reads what another has written, or overwrites what another may still have to read: a block may lie in several
    threads at once.
    """
    h = tl.program_id(0)
    block = tl.arange(0, B)
    fires = (tl.load(fire_ptr + h) != 0).to(tl.int32)
    keep = tl.full((), 0, tl.int64)
    if REUSE == 2:
        heads = tl.arange(0, HP)
        keep = tl.min(tl.load(there_ptr + heads, mask=heads < H, other=0x7FFFFFFFFFFFFFFF), 0)
    room = M
    total = tl.full((), 0, tl.int32)
    for start in range(0, W, B):
        span, count, room = accepted(want_ptr, read_ptr, lengths_ptr, fires, room, h, start, W, G, R, P, READ, B)
        stay = tl.minimum(count, tl.load(held_ptr + h * S + span, mask=count > 0, other=0).to(tl.int32))
        if REUSE == 0:
            stay = tl.full((B,), 0, tl.int32)
        if REUSE == 2:
            cells_before = tl.cumsum(stay, 0) - stay
            reused = tl.sum(stay, 0)
            stay = tl.minimum(stay, tl.maximum(keep - cells_before, 0)).to(tl.int32)
            keep -= reused
        missing = count - stay
        inside = start + block < W
        tl.store(ends_ptr + h * W + start + block, total + tl.cumsum(missing, 0), mask=inside)
        tl.store(count_ptr + h * W + start + block, count, mask=inside)
        total += tl.sum(missing, 0)
        tl.debug_barrier()
        tl.store(held_ptr + h * S + span, (-1 - stay).to(tl.int64), mask=count > 0)
    tl.store(total_ptr + h, total)
    tl.debug_barrier()

    until = tl.full((), -1, tl.int64)
    if total > 0:
        until = oldest(held_ptr, stamp_ptr, total, h, S, M, B, T)
    tl.debug_barrier()
    for start in range(0, S, B):
        address = h * S + start + block
        inside = start + block < S
        held = tl.load(held_ptr + address, mask=inside, other=0)
        stamp = tl.load(stamp_ptr + address, mask=inside, other=0)
        hot = tl.load(hot_ptr + address, mask=inside, other=0)
        evicted = (held > 0) & (stamp <= until)
        hot = tl.where(evicted, 0, tl.where(held != 0, 1, hot))
        kept_cells = tl.where(evicted, 0, tl.maximum(held, -1 - held))
        tl.debug_barrier()
        tl.store(kept_ptr + address, kept_cells.to(tl.int32), mask=inside)
        tl.store(held_ptr + address, 0, mask=evicted)
        tl.store(hot_ptr + address, hot, mask=inside)
        if FACTORS:
            tl.store(came_ptr + address, 0, mask=inside)
    tl.debug_barrier()

    clock = tl.load(clock_ptr)
    for start in range(0, W, B):
        w = start + block
        count = tl.load(count_ptr + h * W + w, mask=w < W, other=0)
        span = tl.load(want_ptr + h * W + w, mask=count > 0, other=0)
        tl.store(held_ptr + h * S + span, count.to(tl.int64), mask=count > 0)
        tl.store(stamp_ptr + h * S + span, clock * W + W - w, mask=count > 0)
    raw = tl.full((), 0, tl.int64)
    if CELLS:
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
            0,
            0,
            total,
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
    tl.store(moved_ptr + h, raw * unit_bytes)
