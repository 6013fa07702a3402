"""The kernels of k2 (kernels/page_scores.py): the scores of a tile of pages, and the softmax over all of them.

Shapes: as there.
"""

from __future__ import annotations

from kvlens.kernels.compat import jit, tl


@jit
def candidates(candidate_ptr, b, h, page, places, c_b, c_h, c_n, COUNTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which pages are candidates: by their flags, or, COUNTED, the first so many."""
    if COUNTED:
        return page < tl.load(candidate_ptr)
    else:
        return tl.load(candidate_ptr + b * c_b + h * c_h + page * c_n, mask=page < places, other=0) != 0


@jit
def score(  # type: ignore[no-untyped-def]
    q_ptr,
    lo_ptr,
    hi_ptr,
    candidate_ptr,
    score_ptr,
    top_ptr,
    sum_ptr,
    scaling,
    places,
    q_b,
    q_h,
    p_b,
    p_h,
    p_n,
    c_b,
    c_h,
    c_n,
    HKV: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    POOL: tl.constexpr,
    SOFT: tl.constexpr,
    COUNTED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: one (sequence, KV head) and one tile of pages. SOFT: scores [B, Hq, N] of every query head, and per
    tile their maximum and the sum of exponentials above it, [B, Hq, tiles]; else the pooled scores [B, H_kv, N]."""
    bh = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    b = bh // HKV
    h = bh % HKV
    g = tl.arange(0, GP)
    real = g < G
    d = tl.arange(0, D)
    page = tile * TILE + tl.arange(0, TILE)
    inside = page < places
    # first of all in fp32, whatever the storage: the interpreter cannot compute in bf16
    q = tl.load(q_ptr + b * q_b + (h * G + g)[:, None] * q_h + d[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    if POOL == "MaxQ":
        q = tl.where((g == 0)[:, None], tl.max(tl.where(real[:, None], q, float("-inf")), 0)[None, :], 0.0)
    if POOL == "MeanQ":
        q = tl.where((g == 0)[:, None], (tl.sum(q, 0) / G)[None, :], 0.0)
    address = b * p_b + h * p_h + page[:, None] * p_n + d[None, :]
    hi = tl.load(hi_ptr + address, mask=inside[:, None], other=0.0).to(COMPUTE)
    s = tl.dot(tl.maximum(q, 0.0).to(COMPUTE), tl.trans(hi), input_precision="ieee")
    lo = tl.load(lo_ptr + address, mask=inside[:, None], other=0.0).to(COMPUTE)
    s = tl.dot(tl.minimum(q, 0.0).to(COMPUTE), tl.trans(lo), acc=s, input_precision="ieee") * scaling
    # read last: held through the products it costs registers; what is no candidate spoils its own column alone
    live = candidates(candidate_ptr, b, h, page, places, c_b, c_h, c_n, COUNTED)
    if SOFT:
        s = tl.where(live[None, :], s, float("-inf"))
        row = bh * G + g
        tl.store(score_ptr + row[:, None] * places + page[None, :], s, mask=real[:, None] & inside[None, :])
        top = tl.max(s, 1)
        level = tl.where(top == float("-inf"), 0.0, top)
        tl.store(top_ptr + row * tl.num_programs(1) + tile, top, mask=real)
        tl.store(sum_ptr + row * tl.num_programs(1) + tile, tl.sum(tl.exp(s - level[:, None]), 1), mask=real)
    else:
        if POOL == "MeanQK":
            pooled = tl.sum(s, 0) / G  # rows of padding are 0
        elif POOL == "MaxQK":
            pooled = tl.max(tl.where(real[:, None], s, float("-inf")), 0)
        else:
            pooled = tl.sum(s, 0)  # row 0 is the only one
        tl.store(score_ptr + bh * places + page, tl.where(live, pooled, float("-inf")), mask=inside)


@jit
def pool_softmax(  # type: ignore[no-untyped-def]
    score_ptr,
    top_ptr,
    sum_ptr,
    candidate_ptr,
    out_ptr,
    log_group,
    places,
    tiles,
    c_b,
    c_h,
    c_n,
    HKV: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    TP: tl.constexpr,
    COUNTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Finish the log-softmax over all pages from the tiles' maxima and sums, and pool it over the group: the largest,
    or the mean as a sum of exponentials above the largest so far."""
    bh = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * TILE + tl.arange(0, TILE)
    each = tl.arange(0, TP)
    live = candidates(candidate_ptr, bh // HKV, bh % HKV, page, places, c_b, c_h, c_n, COUNTED) & (page < places)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    above = tl.zeros((TILE,), tl.float32)
    for g in tl.static_range(G):
        row = bh * G + g
        tops = tl.load(top_ptr + row * tiles + each, mask=each < tiles, other=float("-inf"))
        sums = tl.load(sum_ptr + row * tiles + each, mask=each < tiles, other=0.0)
        top = tl.max(tops, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(tops - top) * sums, 0)
        level = top + tl.log(tl.where(total > 0, total, 1.0))
        share = tl.load(score_ptr + row * places + page, mask=live, other=0.0) - level
        highest = tl.maximum(best, share)
        if MEAN:
            above = above * tl.exp(best - highest) + tl.exp(share - highest)
        best = highest
    if MEAN:
        best = best + tl.log(above) - log_group
    tl.store(out_ptr + bh * places + page, tl.where(live, best, float("-inf")), mask=page < places)
