"""Parts of the plan of a recall zone (zone_kernel.py) that are decisions of their own: which wishes fit, how much of
them is there, and which spans give way. h: the KV head; shapes as there."""

from __future__ import annotations

from kvlens.kernels.compat import jit, tl


@jit
def accepted(  # type: ignore[no-untyped-def]
    want_ptr,
    read_ptr,
    lengths_ptr,
    fires,
    room,
    h,
    start,
    W,
    G,
    R,
    P: tl.constexpr,
    READ: tl.constexpr,
    B: tl.constexpr,
):
    """Of B wishes: their spans, the cells of those that are accepted (0: no wish, or refused), and the room that is
    left. Greedy in order of priority, skipping what does not fit: what is larger than the room is refused for good,
    since room only shrinks; of the others a round takes all that fit one after the other, and refuses the first that
    does not."""
    w = start + tl.arange(0, B)
    span = tl.load(want_ptr + h * W + w, mask=w < W, other=-1)
    wish = span >= 0
    if READ:
        tokens = tl.full((B,), 0, tl.int32)
        for g in range(0, G):
            tokens = tl.maximum(tokens, tl.load(read_ptr + (h * G + g) * R + span, mask=wish, other=0).to(tl.int32))
    else:
        tokens = tl.load(lengths_ptr + span, mask=wish, other=0.0).to(tl.int32)
    count = tokens // P * fires
    takes = tl.full((B,), 0, tl.int32)
    refused = start - 1
    while refused < start + B:
        open_ = tl.where((w > refused) & (count <= room), count, 0)
        over = (open_ > 0) & (tl.cumsum(open_, 0) > room)
        refused = tl.min(tl.where(over, w, start + B), 0)
        cells = tl.where(w < refused, open_, 0)
        takes += cells
        room -= tl.sum(cells, 0)
    return span, takes, room


@jit
def reusable(  # type: ignore[no-untyped-def]
    want_ptr,
    read_ptr,
    lengths_ptr,
    fire_ptr,
    held_ptr,
    there_ptr,
    W,
    S,
    M,
    G,
    R,
    P: tl.constexpr,
    READ: tl.constexpr,
    B: tl.constexpr,
):
    """Cells of a KV head's accepted wishes that are there already; without end for one that does not fire."""
    h = tl.program_id(0)
    fires = (tl.load(fire_ptr + h) != 0).to(tl.int32)
    room = M
    reused_cells = tl.full((B,), 0, tl.int64)
    for start in range(0, W, B):
        span, count, room = accepted(want_ptr, read_ptr, lengths_ptr, fires, room, h, start, W, G, R, P, READ, B)
        held = tl.load(held_ptr + h * S + span, mask=count > 0, other=0)
        reused_cells += tl.minimum(count, held)
    tl.store(there_ptr + h, tl.where(fires != 0, tl.sum(reused_cells, 0), 0x7FFFFFFFFFFFFFFF))


@jit
def oldest(held_ptr, stamp_ptr, total, h, S, M, B: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """The time up to which held spans that nobody wishes for give way, so that `total` cells are free: a span goes as
    long as those before it do not suffice. Every pass leaves a T-th of the times that are in question."""
    s = tl.arange(0, B)
    firsts = tl.full((B,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    lasts = tl.full((B,), -1, tl.int64)
    held_cells = tl.full((B,), 0, tl.int32)
    for start in range(0, S, B):
        held = tl.load(held_ptr + h * S + start + s, mask=start + s < S, other=0)
        stamp = tl.load(stamp_ptr + h * S + start + s, mask=start + s < S, other=0)
        held_cells += tl.where(held < 0, -1 - held, held).to(tl.int32)
        firsts = tl.where(held > 0, tl.minimum(firsts, stamp), firsts)
        lasts = tl.where(held > 0, tl.maximum(lasts, stamp), lasts)
    shortage = total - (M - tl.sum(held_cells, 0))
    oldest_stamp = tl.min(firsts, 0)
    end = tl.max(lasts, 0) + 1
    # what is older than `oldest_stamp` does not suffice, what is older than `end` does, or is all
    if shortage <= 0:
        oldest_stamp = tl.full((), -1, tl.int64)
        end = oldest_stamp
    while end - oldest_stamp > 1:
        step = (end - oldest_stamp + T - 1) // T
        probe = oldest_stamp + step * tl.arange(0, T)
        freed = tl.full((B, T), 0, tl.int32)
        for start in range(0, S, B):
            held = tl.load(held_ptr + h * S + start + s, mask=start + s < S, other=0)
            stamp = tl.load(stamp_ptr + h * S + start + s, mask=start + s < S, other=0)
            older = (held > 0)[:, None] & (stamp[:, None] < probe[None, :])
            freed += tl.where(older, held.to(tl.int32)[:, None], 0)
        short = tl.sum(((tl.sum(freed, 0) < shortage) & (probe < end)).to(tl.int64), 0)
        end = tl.minimum(end, oldest_stamp + step * short)
        oldest_stamp += step * (short - 1)
    return oldest_stamp
