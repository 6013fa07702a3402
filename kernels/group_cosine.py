"""How alike this step's queries are to the last step's: their cosine, pooled over the query heads of each KV head, in
one launch. Tensors only. Shapes: Hq query heads, H KV heads, D head size.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, next_power_of_two, tl

LEAST = 1e-8
"""smallest norm that is divided by, as in torch.cosine_similarity"""


def group_cosine(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    """Return the cosine of q and previous, both [Hq, D], pooled ('mean', 'max' or 'min') -> float32 [H]. CUDA tensors
    take Triton, others PyTorch."""
    if backend(q) == "triton":
        return group_cosine_triton(q, previous, kv_heads, pooling)
    return group_cosine_torch(q, previous, kv_heads, pooling)


def group_cosine_torch(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    """The reference."""
    cosine = torch.cosine_similarity(q.float(), previous.float(), dim=-1).unflatten(0, (kv_heads, -1))
    return {"mean": cosine.mean, "max": cosine.amax, "min": cosine.amin}[pooling](-1)


def group_cosine_triton(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    """As `group_cosine`."""
    out: torch.Tensor = torch.ops.kvlens.group_cosine(q, previous, kv_heads, pooling)
    return out


@torch.library.custom_op(
    "kvlens::group_cosine", mutates_args=(), schema="(Tensor q, Tensor previous, int kv_heads, str pooling) -> Tensor"
)
def _group_cosine(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    """A custom operator, so that torch.compile takes it as one call."""
    heads, dim = q.shape
    group = heads // kv_heads
    assert q.stride(1) == previous.stride(1) == 1
    out = torch.empty(kv_heads, dtype=torch.float32, device=q.device)
    _pool[(kv_heads,)](
        q,
        previous,
        out,
        q.stride(0),
        previous.stride(0),
        LEAST,
        G=group,
        GP=next_power_of_two(group),
        D=dim,
        DP=next_power_of_two(dim),
        POOL=pooling,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out


@_group_cosine.register_fake
def _(q: torch.Tensor, previous: torch.Tensor, kv_heads: int, pooling: str) -> torch.Tensor:
    return q.new_empty(kv_heads, dtype=torch.float32)


@jit
def _pool(  # type: ignore[no-untyped-def]
    q_ptr,
    previous_ptr,
    out_ptr,
    q_h,
    previous_h,
    least,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    POOL: tl.constexpr,
):
    """One program: the query heads of a KV head."""
    h = tl.program_id(0)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    here = (g < G)[:, None] & (d < D)[None, :]
    head = (h * G + g)[:, None]
    a = tl.load(q_ptr + head * q_h + d[None, :], mask=here, other=0.0).to(tl.float32)
    b = tl.load(previous_ptr + head * previous_h + d[None, :], mask=here, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(a * a, 1)), least) * tl.maximum(tl.sqrt(tl.sum(b * b, 1)), least)
    cosine = tl.sum(a * b, 1) / length
    if POOL == "mean":
        pooled = tl.sum(tl.where(g < G, cosine, 0.0), 0) / G
    elif POOL == "max":
        pooled = tl.max(tl.where(g < G, cosine, float("-inf")), 0)
    else:
        pooled = tl.min(tl.where(g < G, cosine, float("inf")), 0)
    tl.store(out_ptr + h, pooled)
