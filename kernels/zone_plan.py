"""The recall of one layer's static step, planned in one launch: which wishes fit, what of them is there, which spans
give way, what each cell holds from now on and what its slots are called. The reference is kernels/zone_torch.py, and
what lies where is equal bit for bit.

Unlike k5's pages (kernels/recall_plan.py) spans have any length and of a span the leading cells are held. A program
plans for one KV head. It goes through wishes, spans and cells a block at a time, so none of their numbers is bounded,
and nothing is sorted: held spans were wished for at different times, so those that give way are the ones up to one
time, which is searched for. Shapes: H KV heads, W wishes, S span ids, M cells of P tokens, G query heads of a KV head.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, next_power_of_two, tl
from kvlens.kernels.zone_parts import accepted, oldest, reusable
from kvlens.kernels.zone_torch import Moves, Names, Source, Wishes, ZoneTables, zone_plan_torch

BLOCK = 1024
"""wishes, spans or slots taken at a time"""
WARPS = 8
PROBES = 8
"""times that one pass over the spans decides between"""
_Moves = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def zone_plan(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """Plan one layer's recall; `tables` and `names` are written. CUDA tensors take Triton, others PyTorch."""
    return (zone_plan_triton if backend(wishes.requested) == "triton" else zone_plan_torch)(
        tables, names, wishes, source
    )


def zone_plan_triton(tables: ZoneTables, names: Names, wishes: Wishes, source: Source) -> Moves:
    """As `zone_plan_torch`, in one launch, or two where KV heads reuse alike. It needs no number of rounds, and tables
    but `names` and `packed` that are contiguous."""
    unit, moved, rebuilt, came = _plan_zone(
        wishes.requested,
        wishes.read,
        source.lengths,
        source.starts,
        source.packed,
        wishes.fire,
        wishes.clock,
        tables.held,
        tables.stamp,
        tables.span,
        tables.offset,
        tables.live,
        names.position,
        names.span,
        names.role,
        names.is_hot,
        source.page,
        source.origin,
        source.unit_bytes,
        wishes.reuse,
        wishes.equal_reuse,
        list(names.roles),
    )
    return Moves(unit, moved, None, None) if source.packed is None else Moves(unit, moved, rebuilt, came)


# A custom operator, so that torch.compile takes it as one call.
@torch.library.custom_op(
    "kvlens::zone_plan",
    mutates_args=("held", "stamp", "span", "offset", "live", "position", "slot_span", "role", "is_hot"),
    schema=(
        "(Tensor requested, Tensor? read, Tensor lengths, Tensor starts, Tensor? packed, Tensor fire, Tensor clock, "
        "Tensor(a!) held,"
        " Tensor(b!) stamp, Tensor(c!) span, Tensor(d!) offset, Tensor(e!) live, Tensor(f!) position, "
        "Tensor(g!) slot_span, Tensor(h!) role,"
        " Tensor(i!) is_hot, int page, int origin, int unit_bytes, bool reuse, bool equal_reuse, int[] roles)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _plan_zone(
    requested: torch.Tensor,
    read: torch.Tensor | None,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    packed: torch.Tensor | None,
    fire: torch.Tensor,
    clock: torch.Tensor,
    held: torch.Tensor,
    stamp: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    live: torch.Tensor,
    position: torch.Tensor,
    slot_span: torch.Tensor,
    role: torch.Tensor,
    is_hot: torch.Tensor,
    page: int,
    origin: int,
    unit_bytes: int,
    reuse: bool,
    equal_reuse: bool,
    roles: list[int],
) -> _Moves:
    """What `zone_plan_triton` is given, one by one -> what `Moves` has, empty for None."""
    heads, wishes = requested.shape
    spans, cells = held.shape[1], span.shape[1]
    requested, fire, read = requested.contiguous(), fire.contiguous(), None if read is None else read.contiguous()
    assert all(x.is_contiguous() for x in (held, stamp, span, offset, live, is_hot))
    assert position.stride() == slot_span.stride() == role.stride()
    ends, count = requested.new_empty(2, heads, wishes, dtype=torch.int32)
    unit, moved = span.new_empty(heads, cells, dtype=torch.int32), span.new_empty(heads)
    rebuilt, came = (live.new_empty((heads, size) if packed is not None else (0,)) for size in (cells, spans))
    there = span.new_empty(heads)
    flags = [x.view(torch.uint8) for x in (fire, live, is_hot, rebuilt, came)]
    asked = (requested, read, lengths, flags[0], held)
    sizes = {
        "W": wishes,
        "S": spans,
        "M": cells,
        "G": 1 if read is None else read.shape[1],
        "R": 0 if read is None else read.shape[2],
    }
    fixed = {"P": page, "READ": read is not None, "B": BLOCK, "num_warps": WARPS, "enable_fp_fusion": True}
    if reuse and equal_reuse:
        reusable[(heads,)](*asked, there, **sizes, **fixed)
    names = next_power_of_two(page)
    strides = (0, 0) if packed is None else packed.stride()
    _plan[(heads,)](
        *asked,
        there,
        starts,
        packed,
        clock,
        stamp,
        span,
        offset,
        flags[1],
        position,
        slot_span,
        role,
        flags[2],
        ends,
        count,
        unit,
        moved,
        flags[3],
        flags[4],
        *strides,
        position.stride(0),
        origin,
        unit_bytes,
        **sizes,
        H=heads,
        HP=next_power_of_two(heads),
        REUSE=2 if reuse and equal_reuse else int(reuse),
        FACTORS=packed is not None,
        RAW=roles[0],
        FACTORED=roles[1],
        FREE=roles[2],
        STEPS=wishes.bit_length(),
        BC=max(1, BLOCK // names),
        PP=names,
        T=PROBES,
        **fixed,
    )
    return unit, moved, rebuilt, came


@_plan_zone.register_fake
def _(
    requested: torch.Tensor,
    read: torch.Tensor | None,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    packed: torch.Tensor | None,
    fire: torch.Tensor,
    clock: torch.Tensor,
    held: torch.Tensor,
    stamp: torch.Tensor,
    span: torch.Tensor,
    offset: torch.Tensor,
    live: torch.Tensor,
    position: torch.Tensor,
    slot_span: torch.Tensor,
    role: torch.Tensor,
    is_hot: torch.Tensor,
    page: int,
    origin: int,
    unit_bytes: int,
    reuse: bool,
    equal_reuse: bool,
    roles: list[int],
) -> _Moves:
    heads, (_, spans), (_, cells) = len(requested), held.shape, span.shape
    rebuilt, came = (live.new_empty((heads, size) if packed is not None else (0,)) for size in (cells, spans))
    return span.new_empty(heads, cells, dtype=torch.int32), span.new_empty(heads), rebuilt, came


@jit
def _plan(  # type: ignore[no-untyped-def]
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
):
    """One program per KV head. REUSE: 0 nothing stays, 1 all, 2 as much as `there` says of the KV head that can reuse
    fewest.

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
    left = M
    total = tl.full((), 0, tl.int32)
    for start in range(0, W, B):
        span, count, left = accepted(want_ptr, read_ptr, lengths_ptr, fires, left, h, start, W, G, R, P, READ, B)
        stay = tl.minimum(count, tl.load(held_ptr + h * S + span, mask=count > 0, other=0).to(tl.int32))
        if REUSE == 0:
            stay = tl.full((B,), 0, tl.int32)
        if REUSE == 2:
            before = tl.cumsum(stay, 0) - stay
            reused = tl.sum(stay, 0)
            stay = tl.minimum(stay, tl.maximum(keep - before, 0)).to(tl.int32)
            keep -= reused
        missing = count - stay
        inside = start + block < W
        tl.store(ends_ptr + h * W + start + block, total + tl.cumsum(missing, 0), mask=inside)
        tl.store(count_ptr + h * W + start + block, count, mask=inside)
        total += tl.sum(missing, 0)
        tl.debug_barrier()
        tl.store(held_ptr + h * S + span, (-1 - stay).to(tl.int64), mask=count > 0)
    tl.debug_barrier()

    until = tl.full((), -1, tl.int64)
    if total > 0:
        until = oldest(held_ptr, stamp_ptr, total, h, S, M, B, T)
    tl.debug_barrier()
    for start in range(0, S, B):
        at = h * S + start + block
        inside = start + block < S
        held = tl.load(held_ptr + at, mask=inside, other=0)
        stamp = tl.load(stamp_ptr + at, mask=inside, other=0)
        hot = tl.load(hot_ptr + at, mask=inside, other=0)
        gone = (held > 0) & (stamp <= until)
        hot = tl.where(gone, 0, tl.where(held != 0, 1, hot))
        tl.debug_barrier()
        tl.store(held_ptr + at, 0, mask=gone)
        tl.store(hot_ptr + at, hot, mask=inside)
        if FACTORS:
            tl.store(came_ptr + at, 0, mask=inside)
    tl.debug_barrier()

    free_before = tl.full((), 0, tl.int32)
    raw_cells = tl.full((), 0, tl.int64)
    cell = tl.arange(0, BC)
    page = tl.arange(0, PP)
    for start in range(0, M, BC):
        inside = start + cell < M
        at = h * M + start + cell
        live = tl.load(live_ptr + at, mask=inside, other=0)
        span = tl.load(span_ptr + at, mask=inside, other=0)
        offset = tl.load(offset_ptr + at, mask=inside, other=0)
        kept = tl.load(held_ptr + h * S + span, mask=live != 0, other=0)
        kept = tl.where(kept < 0, -1 - kept, kept)
        stays = (live != 0) & (offset < kept)
        free = (inside & (stays.to(tl.int32) == 0)).to(tl.int32)
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
        free_before += tl.sum(free, 0)
        lives = stays | fill
        packed = tl.full((BC,), 0, tl.int64)
        if FACTORS:
            packed = tl.load(packed_ptr + h * packed_h + span * packed_s, mask=lives, other=0)
        first = tl.load(starts_ptr + span, mask=fill, other=0).to(tl.int64)
        raw = fill & (packed <= 0)
        raw_cells += tl.sum(raw.to(tl.int64), 0)
        row = (first - origin) // P + offset
        role = tl.where(lives, tl.where(packed > 0, FACTORED, RAW), FREE)
        slot = h * slots_h + (start + cell)[:, None] * P + page[None, :]
        named = inside[:, None] & (page < P)[None, :]
        new = fill[:, None] & (page < P)[None, :]
        tl.debug_barrier()
        tl.store(span_ptr + at, span, mask=fill)
        tl.store(offset_ptr + at, offset, mask=fill)
        tl.store(live_ptr + at, lives.to(tl.uint8), mask=inside)
        tl.store(unit_ptr + at, tl.where(raw, row * H + h, -1).to(tl.int32), mask=inside)
        if FACTORS:
            tl.store(rebuilt_ptr + at, (fill & (packed > 0)).to(tl.uint8), mask=inside)
            tl.store(came_ptr + h * S + span, (fill & (packed > 0)).to(tl.uint8), mask=fill & (packed > 0))
        tl.store(position_ptr + slot, ((first + offset * P)[:, None] + page[None, :]).to(tl.int32), mask=new)
        tl.store(name_ptr + slot, tl.broadcast_to(span.to(tl.int32)[:, None], (BC, PP)), mask=new)
        tl.store(role_ptr + slot, tl.broadcast_to(role.to(tl.uint8)[:, None], (BC, PP)), mask=named)
    tl.store(moved_ptr + h, raw_cells * unit_bytes)
    tl.debug_barrier()

    clock = tl.load(clock_ptr)
    for start in range(0, W, B):
        w = start + block
        count = tl.load(count_ptr + h * W + w, mask=w < W, other=0)
        span = tl.load(want_ptr + h * W + w, mask=count > 0, other=0)
        tl.store(held_ptr + h * S + span, count.to(tl.int64), mask=count > 0)
        tl.store(stamp_ptr + h * S + span, clock * W + W - w, mask=count > 0)
