"""What KV heads read that speculate with the last step's query: those whose queries have turned since read what they
wish for now, the others what they wished for then. One launch decides which, and remembers this step.

Tensors only. Shapes: Hq query heads, H KV heads, D head size, W wishes, S span ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, next_power_of_two, tl

LEAST = 1e-8
"""smallest norm that is divided by, as in torch.cosine_similarity"""
SPANS = 1024
"""span ids a program marks at once"""


class Turned(NamedTuple):
    """alike float32 [H]: cosine of this step's queries and the last one's, pooled over the query heads of a KV head;
    now bool [H]: heads that have turned; fine bool [H, S]: spans that are read, id 0 never."""

    alike: torch.Tensor
    now: torch.Tensor
    fine: torch.Tensor


def turned_reads(
    q: torch.Tensor,
    wishes: torch.Tensor,
    queries: torch.Tensor,
    selected: torch.Tensor,
    spans: int,
    tau: float,
    pooling: str,
) -> Turned:
    """q [Hq, D], wishes int64 [H, W] span ids, -1: none; queries, selected of the same shapes: the last step's, which
    become this one's. A head has turned where its cosine, pooled by 'mean', 'max' or 'min', is below tau; tau 1: every
    head, tau 0: none. spans: S. CUDA tensors take Triton, others PyTorch."""
    if backend(q) == "triton":
        return turned_reads_triton(q, wishes, queries, selected, spans, tau, pooling)
    return turned_reads_torch(q, wishes, queries, selected, spans, tau, pooling)


def turned_reads_torch(
    q: torch.Tensor,
    wishes: torch.Tensor,
    queries: torch.Tensor,
    selected: torch.Tensor,
    spans: int,
    tau: float,
    pooling: str,
) -> Turned:
    """The reference."""
    heads = len(wishes)
    cosine = torch.cosine_similarity(q.float(), queries.float(), dim=-1).unflatten(0, (heads, -1))
    alike = {"mean": cosine.mean, "max": cosine.amax, "min": cosine.amin}[pooling](-1)
    # at the two ends tau is a mode, whatever the cosine comes to: it may be negative, and 1 within rounding
    now = alike < tau if 0 < tau < 1 else torch.full_like(alike, tau == 1, dtype=torch.bool)
    fine = mark_spans(torch.where(now[:, None], wishes, selected), spans)
    queries.copy_(q)
    selected.copy_(wishes)
    return Turned(alike, now, fine)


def mark_spans(ids: torch.Tensor, spans: int) -> torch.Tensor:
    """Span ids [H, W], -1: none -> bool [H, S], id 0 never marked."""
    fine = torch.zeros(len(ids), spans, dtype=torch.bool, device=ids.device)
    fine.scatter_(1, ids.clamp(min=0), True)
    fine[:, 0] = False
    return fine


def turned_reads_triton(
    q: torch.Tensor,
    wishes: torch.Tensor,
    queries: torch.Tensor,
    selected: torch.Tensor,
    spans: int,
    tau: float,
    pooling: str,
) -> Turned:
    """As `turned_reads`."""
    return Turned(*torch.ops.kvlens.turned_reads(q, wishes, queries, selected, spans, tau, pooling))


@torch.library.custom_op(
    "kvlens::turned_reads",
    mutates_args=("queries", "selected"),
    schema=(
        "(Tensor q, Tensor wishes, Tensor(a!) queries, Tensor(b!) selected, int spans, float tau, str pooling) -> "
        "(Tensor, Tensor, Tensor)"
    ),
)
def _turned_reads(
    q: torch.Tensor,
    wishes: torch.Tensor,
    queries: torch.Tensor,
    selected: torch.Tensor,
    spans: int,
    tau: float,
    pooling: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A custom operator, so that torch.compile takes it as one call."""
    alike, now, fine = _outputs(q, wishes, spans)
    heads, width = wishes.shape
    group = len(q) // heads
    assert q.stride(1) == queries.stride(1) == wishes.stride(1) == selected.stride(1) == 1
    _read[(heads,)](
        q,
        wishes,
        queries,
        selected,
        alike,
        now.view(torch.uint8),
        fine.view(torch.uint8),
        LEAST,
        tau,
        spans,
        q.stride(0),
        queries.stride(0),
        wishes.stride(0),
        selected.stride(0),
        G=group,
        GP=next_power_of_two(group),
        D=q.shape[1],
        DP=next_power_of_two(q.shape[1]),
        W=width,
        WP=next_power_of_two(width),
        SB=min(SPANS, next_power_of_two(spans)),
        POOL=pooling,
        MODE="all" if tau == 1 else "none" if tau == 0 else "below",
        num_warps=4,
        enable_fp_fusion=True,
    )
    return alike, now, fine


@_turned_reads.register_fake
def _(
    q: torch.Tensor,
    wishes: torch.Tensor,
    queries: torch.Tensor,
    selected: torch.Tensor,
    spans: int,
    tau: float,
    pooling: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(q, wishes, spans)


def _outputs(q: torch.Tensor, wishes: torch.Tensor, spans: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = len(wishes)
    return (
        q.new_empty(heads, dtype=torch.float32),
        q.new_empty(heads, dtype=torch.bool),
        q.new_empty(heads, spans, dtype=torch.bool),
    )


@jit
def _read(  # type: ignore[no-untyped-def]
    q_ptr,
    wishes_ptr,
    queries_ptr,
    selected_ptr,
    alike_ptr,
    now_ptr,
    fine_ptr,
    least,
    tau,
    spans,
    q_h,
    queries_h,
    wishes_h,
    selected_h,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    SB: tl.constexpr,
    POOL: tl.constexpr,
    MODE: tl.constexpr,
):
    """One program: a KV head. It reads the last step's before it writes this one's."""
    h = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    w = tl.arange(0, WP)
    here = (g < G)[:, None] & (d < D)[None, :]
    head = (h * G + g)[:, None]
    q = tl.load(q_ptr + head * q_h + d[None, :], mask=here, other=0.0)
    last = tl.load(queries_ptr + head * queries_h + d[None, :], mask=here, other=0.0)
    wish = tl.load(wishes_ptr + h * wishes_h + w, mask=w < W, other=-1)
    last_wish = tl.load(selected_ptr + h * selected_h + w, mask=w < W, other=-1)
    a = q.to(tl.float32)
    b = last.to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(a * a, 1)), least) * tl.maximum(tl.sqrt(tl.sum(b * b, 1)), least)
    cosine = tl.sum(a * b, 1) / length
    if POOL == "mean":
        alike = tl.sum(tl.where(g < G, cosine, 0.0), 0) / G
    elif POOL == "max":
        alike = tl.max(tl.where(g < G, cosine, float("-inf")), 0)
    else:
        alike = tl.min(tl.where(g < G, cosine, float("inf")), 0)
    if MODE == "all":
        read = wish
        turned = 1
    elif MODE == "none":
        read = last_wish
        turned = 0
    else:
        turned = (alike < tau).to(tl.int32)
        read = tl.where(turned != 0, wish, last_wish)
    tl.store(alike_ptr + h, alike)
    tl.store(now_ptr + h, turned)
    for start in range(0, spans, SB):
        s = start + tl.arange(0, SB)
        marked = tl.max((read[None, :] == s[:, None]).to(tl.int32), 1)
        tl.store(fine_ptr + h * spans + s, tl.where(s > 0, marked, 0).to(tl.uint8), mask=s < spans)
    tl.debug_barrier()  # a head's last step is read by all threads before any of them writes this one
    tl.store(queries_ptr + head * queries_h + d[None, :], q, mask=here)
    tl.store(selected_ptr + h * selected_h + w, wish, mask=w < W)
