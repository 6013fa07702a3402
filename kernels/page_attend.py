"""k1: attention of one decode step over pages, of mixed resolution, with the exact attention mass of every page.

Every KV head of every sequence has a page table of its own. A page is a slot of P entries, of which the first
`page_len` are live; an entry is a token, or the summary of a span with its bias log|S|. The bias is -inf where a query
head does not read an entry. One softmax over all entries; output, LSE (natural logarithm) and masses come from the same
pass over the keys.

Counts lie in device memory and shapes are fixed, so a step can be captured in a CUDA graph.
Shapes: B sequences, Hq query heads, H_kv KV heads, G = Hq / H_kv, N places of the page table, P entries of a page, D
head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import MIN_DOT, compute, next_power_of_two, power_of_two, warps
from kvlens.kernels.merge import merge_triton
from kvlens.kernels.page_attend_kernels import split

PROGRAMS = 256
"""Programs a launch should have at least: two for nearly every SM of an H200. Twice as many read more slowly there, at
32,768 and at 131,072 tokens, and so do 264: 32 parts of a KV head are merged faster than 33"""
STAGES = 3
"""of the loop over pages: two tiles of keys and two of values on their way. On an H200 neither three of each nor tiles
of 32 or 128 entries were faster."""


@dataclass(frozen=True)
class Pages:
    """Where the entries of each (sequence, KV head) lie. All int32.

    table [B, H_kv, N]: slot of each page; page_len [B, H_kv, N]: live entries of each; n_page [B, H_kv]: live places of
    the table, 0 is allowed. What stands behind them in the tables is never read as an address. bias_row [B, H_kv, N]:
    row of the bias that belongs to a page, -1: none (and no traffic). bias [rows, 1 or G, P] float32 is added to the
    scaled scores, for all query heads of a group or for each.
    """

    table: torch.Tensor
    page_len: torch.Tensor
    n_page: torch.Tensor
    bias: torch.Tensor | None = None
    bias_row: torch.Tensor | None = None


@dataclass(frozen=True)
class PageAttention:
    """output [B, Hq, D]; lse [B, Hq] (-inf: nothing was read, the output is 0); mass [B, Hq, N] or None: adds up to 1,
    or to 0."""

    output: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor | None


def page_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: Pages, scaling: float, mass: bool = True
) -> PageAttention:
    """q [B, Hq, D]; keys, values [slots, H_kv, P, D], views with any strides but 1 in the last dimension: token-major
    slots are transposed, slots of one head expanded. CUDA tensors take Triton, others PyTorch."""
    if backend(q) == "triton":
        return page_attention_triton(q, keys, values, pages, scaling, mass)
    return page_attention_torch(q, keys, values, pages, scaling, mass)


def page_attention_torch(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: Pages, scaling: float, mass: bool = True
) -> PageAttention:
    """The reference: float32 inside, float64 where q is float64."""
    batch, kv_heads, places = pages.table.shape
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    device = q.device
    live = torch.arange(places, device=device) < pages.n_page[..., None]
    entry = live[..., None] & (torch.arange(keys.shape[2], device=device) < pages.page_len[..., None])
    slot = pages.table.masked_fill(~live, 0).long()
    head = torch.arange(kv_heads, device=device)[None, :, None]
    k, v = (x[slot, head].to(wide).masked_fill(~entry[..., None], 0) for x in (keys, values))
    grouped = q.to(wide).view(batch, kv_heads, -1, q.shape[-1])
    scores = torch.einsum("bhgd,bhnpd->bhgnp", grouped, k) * scaling
    if pages.bias is not None and pages.bias_row is not None:
        row = pages.bias_row.masked_fill(~live, -1).long()
        added = pages.bias.to(wide)[row.clamp(min=0)].masked_fill((row < 0)[..., None, None], 0)
        scores = scores + added.transpose(2, 3)
    scores = scores.masked_fill(~entry[:, :, None], -torch.inf)
    lse = scores.flatten(3).logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None, None]).exp()
    output = torch.einsum("bhgnp,bhnpd->bhgd", weights, v)
    return PageAttention(
        output.reshape(q.shape).to(q.dtype), lse.flatten(1), weights.sum(-1).flatten(1, 2) if mass else None
    )


def tile_pages(page: int, dim: int) -> int:
    """Pages a program reads at a time: 64 entries, 32 of head size 256 (shared memory and registers,
    docs/evidence/kernels.md)."""
    return max(1, (32 if dim > 128 else 64) // page)


def stages(dim: int, dtype: torch.dtype) -> int:
    """STAGES, and fewer for numbers of four bytes, which spill registers otherwise: two, one of head sizes above 64."""
    return STAGES if dtype.itemsize < 4 else 2 if dim <= 64 else 1


def page_attention_triton(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages,
    scaling: float,
    mass: bool = True,
    splits: int | None = None,
    offsets: torch.Tensor | None = None,
) -> PageAttention:
    """splits: programs that share the pages of one (sequence, KV head); None: enough to fill the device. offsets int64
    [B, 2], multiples of 16: how many numbers behind keys and values each sequence's slots lie, None: nowhere else."""
    batch, heads, dim = q.shape
    kv_heads, places = pages.table.shape[1:]
    page, group = keys.shape[2], heads // kv_heads
    power_of_two(page=page, head_dim=dim)
    assert q.stride(2) == keys.stride(3) == values.stride(3) == 1
    assert pages.table.is_contiguous()
    assert pages.page_len.is_contiguous()
    assert pages.n_page.is_contiguous()
    ppb = max(tile_pages(page, dim), MIN_DOT // page)
    if splits is None:
        splits = max(1, min(-(-places // ppb), -(-PROGRAMS // (batch * kv_heads))))
    bias, bias_row = pages.bias, pages.bias_row
    bias_strides = (0, 0)
    if bias is not None:
        assert bias_row is not None
        assert bias_row.is_contiguous()
        assert bias.stride(2) == 1
        bias_strides = (bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0)
    assert offsets is None or offsets.is_contiguous()
    parts = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    page_lse = torch.empty(batch, heads, places, dtype=torch.float32, device=q.device) if mass else None
    split[(batch * kv_heads, splits)](
        q,
        keys,
        values,
        pages.table,
        pages.page_len,
        pages.n_page,
        bias,
        bias_row,
        parts,
        lses,
        page_lse,
        offsets,
        scaling,
        places,
        q.stride(0),
        q.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        *bias_strides,
        HKV=kv_heads,
        G=group,
        GP=max(MIN_DOT, next_power_of_two(group)),
        D=dim,
        P=page,
        PPB=ppb,
        BIAS=bias is not None,
        MASS=mass,
        OFFSETS=offsets is not None,
        COMPUTE=compute(keys.dtype),
        num_warps=warps(ppb * page, dim, keys.dtype),
        num_stages=stages(dim, keys.dtype),
        enable_fp_fusion=True,
    )
    out, lse = merge_triton(parts, lses, q.dtype, page_lse, pages.n_page)
    return PageAttention(out, lse, page_lse)
