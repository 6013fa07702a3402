"""Merging partial attentions: several (output, LSE) pairs over disjoint sets of entries are one softmax over all of
them.

Splits of k1 are such parts, and so is each span that k3 attends straight from its factors. LSE is the natural logarithm
of the sum of exponentiated scores; a part without entries has output 0 and LSE -inf.
Shapes: B sequences, Hq query heads, H_kv KV heads, S parts, D head size, N places of the page table.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, next_power_of_two, round_to, rounding, tl

PAGES = 256
"""whose mass one program computes"""


def merge(parts: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """parts [B, Hq, S, D], lses [B, Hq, S], float32 -> output [B, Hq, D] in `dtype`, LSE [B, Hq] float32.

    The share of part s in the whole softmax is exp(lses[..., s] - LSE).
    """
    if backend(parts) == "triton":
        return merge_triton(parts, lses, dtype)
    return merge_torch(parts, lses, dtype)


def merge_torch(parts: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, in the precision of its input (float64 stays)."""
    lse = lses.logsumexp(-1)
    weights = (lses - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhs,bhsd->bhd", weights, parts).to(dtype), lse


def merge_triton(
    parts: torch.Tensor,
    lses: torch.Tensor,
    dtype: torch.dtype,
    page_lse: torch.Tensor | None = None,
    n_page: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `merge`. page_lse [B, Hq, N] float32 of k1, live in its first n_page [B, H_kv] places, becomes the pages' mass
    in place: exp(page_lse - LSE), and 0 behind them."""
    batch, heads, count, dim = parts.shape
    assert parts.is_contiguous()
    assert lses.is_contiguous()
    out = torch.empty(batch, heads, dim, dtype=dtype, device=parts.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=parts.device)
    pages, group = (0, 1) if page_lse is None or n_page is None else (page_lse.shape[2], heads // n_page.shape[1])
    _merge[(batch * heads, 1 + -(-pages // PAGES))](
        parts,
        lses,
        out,
        lse,
        page_lse,
        n_page,
        count,
        pages,
        G=group,
        D=dim,
        SP=next_power_of_two(count),
        SB=16,
        NB=PAGES,
        MASS=page_lse is not None,
        **rounding(dtype),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out, lse


@jit
def _merge(  # type: ignore[no-untyped-def]
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    page_lse_ptr,
    n_page_ptr,
    count,
    pages,
    G: tl.constexpr,
    D: tl.constexpr,
    SP: tl.constexpr,
    SB: tl.constexpr,
    NB: tl.constexpr,
    MASS: tl.constexpr,
    TO: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """For each (sequence, query head) one program merges the outputs, in blocks of SB parts, so that D = 256 fits the
    registers; every further one turns NB pages' LSE into their mass."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SP)
    lses = tl.load(part_lse_ptr + row * count + every, mask=every < count, other=float("-inf"))
    top = tl.max(lses, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - top), 0)
    lse = tl.where(total > 0, top + tl.log(total), float("-inf"))
    level = tl.where(total > 0, lse, 0.0)
    block = tl.program_id(1)
    if block == 0:
        tl.store(lse_ptr + row, lse)
        d = tl.arange(0, D)
        out = tl.zeros((D,), tl.float32)
        for block_start in range(0, count, SB):
            part = block_start + tl.arange(0, SB)
            here = part < count
            weight = tl.exp(tl.load(part_lse_ptr + row * count + part, mask=here, other=float("-inf")) - level)
            values = tl.load(part_ptr + (row * count + part)[:, None] * D + d[None, :], mask=here[:, None], other=0.0)
            out += tl.sum(weight[:, None] * values, 0)
        tl.store(out_ptr + row * D + d, round_to(out, TO, BY_HAND))
    elif MASS:
        live = tl.load(n_page_ptr + row // G)  # rows of a KV head follow one another
        page = (block - 1) * NB + tl.arange(0, NB)
        x = tl.load(page_lse_ptr + row * pages + page, mask=page < live, other=float("-inf"))
        tl.store(page_lse_ptr + row * pages + page, tl.exp(x - level), mask=page < pages)
