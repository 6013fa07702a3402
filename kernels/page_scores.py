"""k2: scores of pages from the elementwise bounds of their keys, pooled over the query heads of a group
(docs/evidence/kernels.md, Sources).

The bound of a page is one of every token's score: sum_d max(q_d lo_d, q_d hi_d). With q+ = max(q, 0) and q- = min(q, 0)
that is q+ . hi + q- . lo, two matrix products and nothing of size group x pages x D in between. Selection follows.

MaxQ, MeanQ pool the queries before scoring; MaxQK, MeanQK pool the scores; MaxS, MeanS pool the softmax over pages of
the scores, and give its logarithm: of unscaled scores the softmax underflows, and pages would be ranked by nothing.
Shapes: B sequences, Hq query heads, H_kv KV heads, G = Hq / H_kv, N places for pages, D head size.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import MIN_DOT, compute, next_power_of_two, power_of_two, warps
from kvlens.kernels.page_score_kernels import pool_softmax, score

Pooling = Literal["MaxQ", "MeanQ", "MaxQK", "MeanQK", "MaxS", "MeanS"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

TILE = 64
"""Pages of one program; at 128 the registers run short at head size 256 (docs/evidence/kernels.md)."""


def page_scores(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, candidate: torch.Tensor, pooling: Pooling, scaling: float
) -> torch.Tensor:
    """q [B, Hq, D]; lo, hi [B, H_kv, N, D], least and largest key of each page by element; candidate bool [B, H_kv, N],
    or int64 0-d: the first so many pages -> [B, H_kv, N] float32, -inf where no candidate; of MaxS and MeanS the
    logarithm of the share.

    An unscaled softmax is scaling = 1. CUDA tensors take Triton, but for head sizes that are no powers of two; others
    PyTorch.
    """
    if backend(q) == "triton" and fits(q.shape[-1]):
        return page_scores_triton(q, lo, hi, candidate, pooling, scaling)
    return page_scores_torch(q, lo, hi, candidate, pooling, scaling)


def fits(head_dim: int) -> bool:
    """Whether the kernel takes this head size."""
    return head_dim >= MIN_DOT and not head_dim & (head_dim - 1)


def bound(q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """Largest q . k that a key within a page's limits could reach: q [..., G, D]; lo, hi [..., N, D] -> [..., G, N]. A
    positive q_d takes the largest value, a negative one the least."""
    return q.clamp(min=0) @ hi.transpose(-1, -2) + q.clamp(max=0) @ lo.transpose(-1, -2)


def page_scores_torch(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, candidate: torch.Tensor, pooling: Pooling, scaling: float
) -> torch.Tensor:
    """The reference, as the definition has it: float32 inside, float64 where q is float64."""
    if candidate.dim() == 0:
        candidate = (torch.arange(lo.shape[2], device=q.device) < candidate).expand(lo.shape[:3])
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    grouped, mean = q.to(wide).unflatten(1, (lo.shape[1], -1)), pooling.startswith("Mean")
    if pooling in ("MaxQ", "MeanQ"):
        grouped = grouped.mean(2, keepdim=True) if mean else grouped.amax(2, keepdim=True)
    scores = (bound(grouped, lo.to(wide), hi.to(wide)) * scaling).masked_fill(~candidate[:, :, None], -torch.inf)
    if pooling in ("MaxS", "MeanS"):
        scores = scores.log_softmax(-1).masked_fill(~candidate[:, :, None], -torch.inf)
        pooled = scores.logsumexp(2) - math.log(scores.shape[2]) if mean else scores.amax(2)
    else:
        pooled = scores.mean(2) if mean else scores.amax(2)
    return pooled.masked_fill(~candidate, -torch.inf)


def page_scores_triton(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, candidate: torch.Tensor, pooling: Pooling, scaling: float
) -> torch.Tensor:
    """lo and hi alike in strides, q and they contiguous in the last dimension. MaxS and MeanS take a second launch: the
    softmax needs all pages."""
    return _page_scores(q, lo, hi, candidate, pooling, scaling)


# A custom operator, so that torch.compile takes it as one call.
@torch.library.custom_op("kvlens::page_scores", mutates_args=())
def _page_scores(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, candidate: torch.Tensor, pooling: str, scaling: float
) -> torch.Tensor:
    """As `page_scores_triton`."""
    batch, heads, dim = q.shape
    kv_heads, places = lo.shape[1:3]
    group = heads // kv_heads
    power_of_two(head_dim=dim)
    assert lo.stride() == hi.stride()
    assert q.stride(2) == lo.stride(3) == 1
    tiles = -(-places // TILE)
    soft = pooling in ("MaxS", "MeanS")
    out = torch.empty(batch, kv_heads, places, dtype=torch.float32, device=q.device)
    raw = torch.empty(batch, heads, places, dtype=torch.float32, device=q.device) if soft else out
    stats = torch.empty(2, batch, heads, tiles, dtype=torch.float32, device=q.device) if soft else (None, None)
    counted = candidate.dim() == 0
    flags = candidate if counted else candidate.view(torch.uint8)
    places_of = (0, 0, 0) if counted else flags.stride()
    common = {"HKV": kv_heads, "G": group, "TILE": TILE, "COUNTED": counted, "enable_fp_fusion": True}
    score[(batch * kv_heads, tiles)](
        q,
        lo,
        hi,
        flags,
        raw,
        stats[0],
        stats[1],
        scaling,
        places,
        q.stride(0),
        q.stride(1),
        *lo.stride()[:3],
        *places_of,
        GP=max(MIN_DOT, next_power_of_two(group)),
        D=dim,
        POOL=pooling,
        SOFT=soft,
        COMPUTE=compute(lo.dtype),
        num_warps=warps(TILE, dim, lo.dtype),
        **common,
    )
    if soft:
        pool_softmax[(batch * kv_heads, tiles)](
            raw,
            stats[0],
            stats[1],
            flags,
            out,
            math.log(group),
            places,
            tiles,
            *places_of,
            TP=next_power_of_two(tiles),
            MEAN=pooling == "MeanS",
            num_warps=2,
            **common,
        )
    return out


@_page_scores.register_fake
def _(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, candidate: torch.Tensor, pooling: str, scaling: float
) -> torch.Tensor:
    return q.new_empty(lo.shape[:3], dtype=torch.float32)
