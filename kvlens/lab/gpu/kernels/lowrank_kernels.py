"""The kernels of k3 (lowrank_spans.py): a tile of a span's tokens rebuilt, and a span attended through its factors.
Shapes: as there.
"""

from __future__ import annotations

from kvlens.kernels.compat import jit, round_to, tl


@jit
def rebuild_tile(  # type: ignore[no-untyped-def]
    flat_ptr,
    meta_ptr,
    tile_ptr,
    k_ptr,
    v_ptr,
    k_slot,
    k_h,
    k_t,
    v_slot,
    v_h,
    v_t,
    HKV: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    COMPUTE: tl.constexpr,
    TO: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """One program: the keys (program_id(1) = 0) or the values of one tile."""
    tile = tile_ptr + tl.program_id(0) * 3
    which = tl.program_id(1)
    place = tl.load(tile)
    if place >= 0:
        first_token = tl.load(tile + 1)
        slot = tl.load(tile + 2)
        h = place // S % HKV
        n = tl.load(meta_ptr + place * 4 + 1)
        rank_k = tl.load(meta_ptr + place * 4 + 2)
        rank = tl.load(meta_ptr + place * 4 + 2 + which)
        u_ptr = flat_ptr + tl.load(meta_ptr + place * 4) + which * (rank_k * (n + D + 1))
        t = tl.arange(0, P)
        r = tl.arange(0, R)
        d = tl.arange(0, D)
        token = first_token + t
        live = token < n
        in_rank = r < rank
        u = tl.load(u_ptr + token[:, None] * rank + r[None, :], mask=live[:, None] & in_rank[None, :], other=0.0).to(
            tl.float32
        )
        g = tl.load(u_ptr + n * rank + r, mask=in_rank, other=0.0).to(tl.float32)
        v = tl.load(u_ptr + (n + 1) * rank + r[:, None] * D + d[None, :], mask=in_rank[:, None], other=0.0).to(COMPUTE)
        x = round_to(tl.dot((u * g[None, :]).to(COMPUTE), v, input_precision="ieee"), TO, BY_HAND)
        if which == 0:
            tl.store(k_ptr + slot * k_slot + h * k_h + t[:, None] * k_t + d[None, :], x, mask=live[:, None])
        else:
            tl.store(v_ptr + slot * v_slot + h * v_h + t[:, None] * v_t + d[None, :], x, mask=live[:, None])


@jit
def attend_span(  # type: ignore[no-untyped-def]
    q_ptr,
    flat_ptr,
    meta_ptr,
    reads_ptr,
    part_ptr,
    lse_ptr,
    scaling,
    q_b,
    q_h,
    HKV: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    MASKED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: one span and the query heads of its group; T tokens at a time, online softmax in base 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    bh = tl.program_id(0).to(tl.int64)
    place = bh * S + tl.program_id(1)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    r = tl.arange(0, R)
    real = g < G
    row = (bh * G + g) * S + tl.program_id(1)  # heads of a group follow one another
    n = tl.load(meta_ptr + place * 4 + 1)
    read = real & (n > 0)
    if MASKED:
        read = read & (tl.load(reads_ptr + row, mask=real, other=0) != 0)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, D), tl.float32)
    if n > 0:
        start = tl.load(meta_ptr + place * 4)
        rank_k = tl.load(meta_ptr + place * 4 + 2)
        rank_v = tl.load(meta_ptr + place * 4 + 3)
        k_u = flat_ptr + start
        k_g = k_u + n * rank_k
        v_u = k_u + rank_k * (n + D + 1)
        v_g = v_u + n * rank_v
        in_k = r < rank_k
        in_v = r < rank_v
        q_at = (bh // HKV) * q_b + (bh % HKV * G + g)[:, None] * q_h + d[None, :]
        q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0).to(COMPUTE)
        k_v = tl.load(k_g + rank_k + r[:, None] * D + d[None, :], mask=in_k[:, None], other=0.0).to(COMPUTE)
        gate = tl.load(k_g + r, mask=in_k, other=0.0).to(tl.float32) * (scaling * LOG2E)
        low = tl.dot(q, tl.trans(k_v), input_precision="ieee") * gate[None, :]
        mixed = tl.zeros((GP, R), tl.float32)
        for block_start in range(0, n, T):
            t = block_start + tl.arange(0, T)
            live = t < n
            u = tl.load(k_u + t[:, None] * rank_k + r[None, :], mask=live[:, None] & in_k[None, :], other=0.0).to(
                tl.float32
            )
            # not rounded to bf16 here: an error of `low` is an error of the score itself, 2^-9 of a score of 20 is 4
            # percent
            s = tl.dot(low, tl.trans(u), input_precision="tf32x3")
            s = tl.where(live[None, :], s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            fade = tl.exp2(top - new_top)
            weight = tl.exp2(s - new_top[:, None])
            total = total * fade + tl.sum(weight, 1)
            w = tl.load(v_u + t[:, None] * rank_v + r[None, :], mask=live[:, None] & in_v[None, :], other=0.0).to(
                COMPUTE
            )
            mixed = mixed * fade[:, None] + tl.dot(weight.to(COMPUTE), w, input_precision="ieee")
            top = new_top
        mixed = mixed * tl.load(v_g + r, mask=in_v, other=0.0).to(tl.float32)[None, :] / total[:, None]
        v_v = tl.load(v_g + rank_v + r[:, None] * D + d[None, :], mask=in_v[:, None], other=0.0).to(COMPUTE)
        out = tl.dot(mixed.to(COMPUTE), v_v, input_precision="ieee")
    lse = tl.where(read, (top + tl.log2(total)) * LN2, float("-inf"))
    tl.store(part_ptr + row[:, None] * D + d[None, :], tl.where(read[:, None], out, 0.0), mask=real[:, None])
    tl.store(lse_ptr + row, lse, mask=real)
