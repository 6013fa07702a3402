"""Which spans a query asks for by their summaries in a routing space, and in which order a KV head wishes for them.

PyTorch says it in some thirty small operations; three launches do it here, so that they do not bound a captured step.
Tensors only. Shapes: Hq query heads, H KV heads, G = Hq / H, D head size, d' routing dimension, C rows of the table, S
span ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kvlens.kernels.best_rows import best_rows, counts
from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, next_power_of_two, tl

TILE = 64
"""rows of one program"""
POOLS = ("max", "mean")
"""over the query heads that ask for a span"""


class Routes(NamedTuple):
    """fine bool [H, G, S]: spans that a query head asks for; wishes int64 [H, C]: ids of those that any head of the
    group asks for, the most wanted first, -1 behind them."""

    fine: torch.Tensor
    wishes: torch.Tensor


class RouteTable(NamedTuple):
    """weight float32 [H or Hq, d', D]: the routing projection, one for a group or for each query head; summary [Hq, C,
    d']; length float32 [C]: tokens of a row's span; ids int64 [C]: its span id, 0: the row is not in use; threshold
    float32 [Hq]: a score above it asks for the span."""

    weight: torch.Tensor
    summary: torch.Tensor
    length: torch.Tensor
    ids: torch.Tensor
    threshold: torch.Tensor


def fits(q: torch.Tensor, table: RouteTable, pool: str) -> bool:
    """Whether the kernel takes these queries, on a device, and this way of pooling."""
    return backend(q) == "triton" and counts(table.length[None]) and pool in POOLS


def routed(q: torch.Tensor, table: RouteTable, heads: int, spans: int, pool: str) -> Routes:
    """Return what queries [Hq, D] ask for, and what KV heads wish for. heads: H; spans: S; pool: one of POOLS. A score
    is (W q) . K_S / sqrt(d') + log|S|; a span's place among the wishes is by the largest or the mean score of the
    query heads that ask for it. Queries and tables that the kernel takes go there, others to PyTorch."""
    take = routed_triton if fits(q, table, pool) else routed_torch
    return take(q, table, heads, spans, pool)


def routed_triton(q: torch.Tensor, table: RouteTable, heads: int, spans: int, pool: str) -> Routes:
    """As `routed`, of at most `best_rows.MOST` rows."""
    fine, priority = torch.ops.kvlens.span_routes(q, *table, heads, spans, pool)
    return Routes(fine, best_rows(priority, priority.shape[1], table.ids))


# A custom operator, so that torch.compile takes it as one call.
@torch.library.custom_op(
    "kvlens::span_routes",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor weight, Tensor summary, Tensor length, Tensor ids, Tensor threshold, int heads, int spans,"
        " str pool) -> (Tensor, Tensor)"
    ),
)
def _span_routes(
    q: torch.Tensor,
    weight: torch.Tensor,
    summary: torch.Tensor,
    length: torch.Tensor,
    ids: torch.Tensor,
    threshold: torch.Tensor,
    heads: int,
    spans: int,
    pool: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> fine [H, G, S], priority float32 [H, C], -inf where nobody asks."""
    group, (_, rows, dim) = len(q) // heads, summary.shape
    assert pool in POOLS
    assert q.stride(1) == 1
    assert all(x.is_contiguous() for x in (weight, summary, length, ids, threshold))
    fine = torch.zeros(heads, group, spans, dtype=torch.bool, device=q.device)
    priority = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    _route[(-(-rows // TILE), heads)](
        q,
        weight,
        summary,
        length,
        ids,
        threshold,
        fine.view(torch.uint8),
        priority,
        rows,
        spans,
        q.stride(0),
        dim**-0.5,
        G=group,
        D=q.shape[1],
        DP=next_power_of_two(q.shape[1]),
        R=dim,
        RP=next_power_of_two(dim),
        OWN=len(weight) == len(q) and group > 1,
        MEAN=pool == "mean",
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return fine, priority


@_span_routes.register_fake
def _(
    q: torch.Tensor,
    weight: torch.Tensor,
    summary: torch.Tensor,
    length: torch.Tensor,
    ids: torch.Tensor,
    threshold: torch.Tensor,
    heads: int,
    spans: int,
    pool: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    fine = q.new_empty(heads, len(q) // heads, spans, dtype=torch.bool)
    return fine, q.new_empty(heads, summary.shape[1], dtype=torch.float32)


def routed_torch(q: torch.Tensor, table: RouteTable, heads: int, spans: int, pool: str) -> Routes:
    """The reference, as the definition has it: float32 inside, float64 where q is float64."""
    group, score = len(q) // heads, scores_torch(q, table)
    asks = (score > table.threshold[:, None]).unflatten(0, (heads, group))
    grouped = score.unflatten(0, (heads, group))
    if pool == "max":
        pooled = grouped.masked_fill(~asks, -math.inf).amax(1)
    else:
        pooled = torch.where(asks, grouped, 0).sum(1) / asks.sum(1)
    priority = pooled.masked_fill(~asks.any(1), -math.inf)
    fine = torch.zeros(heads, group, spans, dtype=torch.bool, device=q.device)
    fine.scatter_(2, table.ids.expand_as(asks), asks)
    fine[..., 0] = False
    return Routes(fine, best_rows(priority.float(), priority.shape[1], table.ids))


def scores_torch(q: torch.Tensor, table: RouteTable) -> torch.Tensor:
    """Scores [Hq, C] of queries [Hq, D], -inf for rows not in use."""
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    weight = table.weight.to(wide)
    each = weight if len(weight) == len(q) else weight.repeat_interleave(len(q) // len(weight), 0)
    routed = torch.einsum("hrd,hd->hr", each, q.to(wide))
    score = torch.einsum("hcr,hr->hc", table.summary.to(wide), routed) / math.sqrt(each.shape[1])
    return (score + table.length.to(wide).log()).masked_fill(table.ids < 1, -math.inf)


@jit
def _route(  # type: ignore[no-untyped-def]
    q_ptr,
    weight_ptr,
    summary_ptr,
    length_ptr,
    ids_ptr,
    threshold_ptr,
    fine_ptr,
    priority_ptr,
    rows,
    spans,
    q_h,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    OWN: tl.constexpr,
    MEAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: TILE rows of a KV head, for all its query heads. OWN: each query head has its own projection. Every
    program projects the queries anew, which takes less time than a launch for it would."""
    h = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    r = tl.arange(0, RP)
    d = tl.arange(0, DP)
    inside = c < rows
    ids = tl.load(ids_ptr + c, mask=inside, other=0)
    alive = ids > 0
    size = tl.log(tl.load(length_ptr + c, mask=alive, other=1.0))
    matrix = r[:, None] * D + d[None, :]
    used = (r < R)[:, None] & (d < D)[None, :]
    if not OWN:
        weight = tl.load(weight_ptr + h * R * D + matrix, mask=used, other=0.0)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    for g in tl.static_range(G):
        head = h * G + g
        if OWN:
            weight = tl.load(weight_ptr + head * R * D + matrix, mask=used, other=0.0)
        q = tl.load(q_ptr + head * q_h + d, mask=d < D, other=0.0).to(tl.float32)
        routed = tl.sum(weight * q[None, :], 1)
        address = (head * rows + c)[:, None] * R + r[None, :]
        summary = tl.load(summary_ptr + address, mask=alive[:, None] & (r < R)[None, :], other=0.0).to(tl.float32)
        score = tl.sum(summary * routed[None, :], 1) * scale + size
        asks = alive & (score > tl.load(threshold_ptr + head))
        best = tl.where(asks, tl.maximum(best, score), best)
        total += tl.where(asks, score, 0.0)
        count += asks.to(tl.int32)
        tl.store(fine_ptr + head * spans + ids, asks.to(tl.uint8), mask=alive)
    if MEAN:
        best = tl.where(count > 0, total / tl.maximum(count, 1).to(tl.float32), float("-inf"))
    tl.store(priority_ptr + h * rows + c, best, mask=inside)
