"""k2: scores of pages from the elementwise bounds of their keys, pooled over the query heads of a group
(docs/kernels.md, Sources).

The score of a page is an upper bound of every token's score: sum_d max(q_d lo_d, q_d hi_d). With q+ = max(q, 0) and q-
= min(q, 0) that is q+ . hi + q- . lo, two matrix products and nothing of size group x pages x D in between. Selection
is torch.topk.

MaxQ, MeanQ pool the queries before scoring; MaxQK, MeanQK pool the scores; MaxS, MeanS pool the softmax over pages of
the scores. Shapes: B sequences, Hq query heads, H_kv KV heads, G = Hq / H_kv, N places for pages, D head size.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import MIN_DOT, compute, jit, next_power_of_two, power_of_two, tl, warps

Pooling = Literal["MaxQ", "MeanQ", "MaxQK", "MeanQK", "MaxS", "MeanS"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

TILE = 64
"""Pages of one program; at 128 the registers run short at head size 256 (docs/kernels.md)."""


def page_scores(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, n_page: torch.Tensor, pooling: Pooling, scaling: float
) -> torch.Tensor:
    """q [B, Hq, D]; lo, hi [B, H_kv, N, D], least and largest key of each page by element; n_page [B, H_kv] int32, live
    places, 0 is allowed -> [B, H_kv, N] float32, -inf behind the live ones.

    An unscaled softmax is scaling = 1. CUDA tensors take Triton, others PyTorch.
    """
    if backend(q) == "triton":
        return page_scores_triton(q, lo, hi, n_page, pooling, scaling)
    return page_scores_torch(q, lo, hi, n_page, pooling, scaling)


def page_scores_torch(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, n_page: torch.Tensor, pooling: Pooling, scaling: float
) -> torch.Tensor:
    """The reference, as the definition has it: float32 inside, float64 where q is float64."""
    batch, kv_heads, places = lo.shape[:3]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    live = (torch.arange(places, device=q.device) < n_page[..., None])[:, :, None]
    grouped = q.to(wide).view(batch, kv_heads, -1, q.shape[-1])
    if pooling in ("MaxQ", "MeanQ"):
        grouped = grouped.amax(2, keepdim=True) if pooling == "MaxQ" else grouped.mean(2, keepdim=True)
    low, high = (x.to(wide).masked_fill(~live[:, :, 0, :, None], 0)[:, :, None] for x in (lo, hi))
    query = grouped[:, :, :, None]
    scores = torch.maximum(query * low, query * high).sum(-1) * scaling
    if pooling in ("MaxS", "MeanS"):
        scores = scores.masked_fill(~live, -torch.inf).softmax(-1)
    pooled = scores.mean(2) if pooling in ("MeanQK", "MeanS") else scores.amax(2)
    return pooled.masked_fill(~live[:, :, 0], -torch.inf)


def page_scores_triton(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, n_page: torch.Tensor, pooling: Pooling, scaling: float
) -> torch.Tensor:
    """lo and hi alike in strides, q and they contiguous in the last dimension. MaxS and MeanS take a second launch: the
    softmax needs all pages."""
    batch, heads, dim = q.shape
    kv_heads, places = lo.shape[1:3]
    group = heads // kv_heads
    power_of_two(head_dim=dim)
    assert lo.stride() == hi.stride()
    assert q.stride(2) == lo.stride(3) == 1
    assert n_page.is_contiguous()
    tiles = -(-places // TILE)
    soft = pooling in ("MaxS", "MeanS")
    out = torch.empty(batch, kv_heads, places, dtype=torch.float32, device=q.device)
    raw = torch.empty(batch, heads, places, dtype=torch.float32, device=q.device) if soft else out
    stats = torch.empty(2, batch, heads, tiles, dtype=torch.float32, device=q.device) if soft else (None, None)
    common = {"HKV": kv_heads, "G": group, "TILE": TILE, "enable_fp_fusion": True}
    _score[(batch * kv_heads, tiles)](
        q,
        lo,
        hi,
        n_page,
        raw,
        stats[0],
        stats[1],
        scaling,
        places,
        q.stride(0),
        q.stride(1),
        *lo.stride()[:3],
        GP=max(MIN_DOT, next_power_of_two(group)),
        D=dim,
        POOL=pooling,
        SOFT=soft,
        COMPUTE=compute(lo.dtype),
        num_warps=warps(TILE, dim, lo.dtype),
        **common,
    )
    if soft:
        _pool_softmax[(batch * kv_heads, tiles)](
            raw,
            stats[0],
            stats[1],
            n_page,
            out,
            places,
            tiles,
            TP=next_power_of_two(tiles),
            MEAN=pooling == "MeanS",
            num_warps=2,
            **common,
        )
    return out


@jit
def _score(  # type: ignore[no-untyped-def]
    q_ptr,
    lo_ptr,
    hi_ptr,
    n_page_ptr,
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
    HKV: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    POOL: tl.constexpr,
    SOFT: tl.constexpr,
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
    live = page < tl.load(n_page_ptr + bh)
    # first of all in fp32, whatever the storage: the interpreter cannot compute in bf16
    q = tl.load(q_ptr + b * q_b + (h * G + g)[:, None] * q_h + d[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    if POOL == "MaxQ":
        q = tl.where((g == 0)[:, None], tl.max(tl.where(real[:, None], q, float("-inf")), 0)[None, :], 0.0)
    if POOL == "MeanQ":
        q = tl.where((g == 0)[:, None], (tl.sum(q, 0) / G)[None, :], 0.0)
    at = b * p_b + h * p_h + page[:, None] * p_n + d[None, :]
    hi = tl.load(hi_ptr + at, mask=live[:, None], other=0.0).to(COMPUTE)
    s = tl.dot(tl.maximum(q, 0.0).to(COMPUTE), tl.trans(hi), input_precision="ieee")
    lo = tl.load(lo_ptr + at, mask=live[:, None], other=0.0).to(COMPUTE)
    s = tl.dot(tl.minimum(q, 0.0).to(COMPUTE), tl.trans(lo), acc=s, input_precision="ieee") * scaling
    if SOFT:
        s = tl.where(live[None, :], s, float("-inf"))
        row = bh * G + g
        tl.store(score_ptr + row[:, None] * places + page[None, :], s, mask=real[:, None] & (page < places)[None, :])
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
        tl.store(score_ptr + bh * places + page, tl.where(live, pooled, float("-inf")), mask=page < places)


@jit
def _pool_softmax(  # type: ignore[no-untyped-def]
    score_ptr,
    top_ptr,
    sum_ptr,
    n_page_ptr,
    out_ptr,
    places,
    tiles,
    HKV: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    TP: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Finish the softmax over all pages from the tiles' maxima and sums, and pool it over the group."""
    bh = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * TILE + tl.arange(0, TILE)
    each = tl.arange(0, TP)
    live = page < tl.load(n_page_ptr + bh)
    pooled = tl.zeros((TILE,), tl.float32)
    for g in tl.static_range(G):
        row = bh * G + g
        tops = tl.load(top_ptr + row * tiles + each, mask=each < tiles, other=float("-inf"))
        sums = tl.load(sum_ptr + row * tiles + each, mask=each < tiles, other=0.0)
        top = tl.max(tops, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(tops - top) * sums, 0)
        s = tl.load(score_ptr + row * places + page, mask=live, other=float("-inf"))
        share = tl.exp(s - top) / tl.where(total > 0, total, 1.0)
        pooled = pooled + share / G if MEAN else tl.maximum(pooled, share)
    tl.store(out_ptr + bh * places + page, tl.where(live, pooled, float("-inf")), mask=page < places)
