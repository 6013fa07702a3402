"""Tokens out of host memory into slots, wherever each of them lies: one launch for a list of tokens.

On CUDA the pool is pinned host memory that the kernel reads in place, so scattered tokens cost one launch instead of a
copy each. Numbers are moved as they are, bit for bit. Tensors only. Shapes: R rows of the pool, H KV heads, C slots, n
tokens, D head size.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, tl

TOKENS = 16
"""a program has under way at once"""
CTAS = 64
"""Programs at most. On an H200 as many moved 512 tokens in 8.2 us where 16 took 11.6; from 4,096 tokens on no number of
programs was faster than another"""


def fits(head_dim: int) -> bool:
    """Whether the kernel takes this head size."""
    return head_dim > 0 and not head_dim & (head_dim - 1)


def gather_tokens(
    pool: torch.Tensor, behind: int, listed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Copy tokens into slots. pool [R, D], contiguous: the keys of token i are row listed[0, i], its values the one
    `behind` rows later; they go to slot listed[2, i] of KV head listed[1, i] of keys, values [H, C, D], 1 the stride of
    the last dimension. listed int64 [3, n], beside the slots; no two tokens into one slot. Slots on CUDA take Triton,
    others PyTorch."""
    if backend(keys) == "triton":
        gather_tokens_triton(pool, behind, listed, keys, values)
    else:
        gather_tokens_torch(pool, behind, listed, keys, values)


def gather_tokens_torch(
    pool: torch.Tensor, behind: int, listed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    rows, heads, slots = listed
    keys[heads, slots] = pool.index_select(0, rows)
    values[heads, slots] = pool.index_select(0, rows + behind)


def gather_tokens_triton(
    pool: torch.Tensor, behind: int, listed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """The pool has to be pinned where the slots are on CUDA."""
    count, dim = listed.shape[1], pool.shape[1]
    assert fits(dim)
    assert pool.is_contiguous()
    assert listed.is_contiguous()
    assert keys.stride(2) == values.stride(2) == 1
    _gather[(min(CTAS, -(-count // TOKENS)),)](
        pool,
        listed,
        keys,
        values,
        count,
        behind * dim,
        *keys.stride()[:2],
        *values.stride()[:2],
        D=dim,
        N=TOKENS,
        BESIDE=behind == 1,
        num_warps=TOKENS // 4,
        enable_fp_fusion=True,
    )


@jit
def _gather(  # type: ignore[no-untyped-def]
    pool_ptr,
    listed_ptr,
    k_ptr,
    v_ptr,
    count,
    behind,
    k_h,
    k_s,
    v_h,
    v_s,
    D: tl.constexpr,
    N: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """One program: N tokens at a time, every num_programs-th N of them. Keys and values are read before either is
    written, and the list an iteration ahead: more bytes under way at once. BESIDE: a token's values lie right behind
    its keys, and both are read as one row."""
    d = tl.arange(0, D)
    both = tl.arange(0, 2 * D)
    step = tl.num_programs(0) * N
    i = tl.program_id(0) * N + tl.arange(0, N)
    next_row = tl.load(listed_ptr + i, mask=i < count, other=0)
    next_head = tl.load(listed_ptr + count + i, mask=i < count, other=0)
    next_slot = tl.load(listed_ptr + 2 * count + i, mask=i < count, other=0)
    for start in range(tl.program_id(0) * N, count, step):
        i = start + tl.arange(0, N)
        live = i < count
        row, head, slot = next_row, next_head, next_slot
        ahead = i + step < count
        next_row = tl.load(listed_ptr + i + step, mask=ahead, other=0)
        next_head = tl.load(listed_ptr + count + i + step, mask=ahead, other=0)
        next_slot = tl.load(listed_ptr + 2 * count + i + step, mask=ahead, other=0)
        to_k = k_ptr + (head * k_h + slot * k_s)[:, None]
        to_v = v_ptr + (head * v_h + slot * v_s)[:, None]
        if BESIDE:
            source = pool_ptr + row[:, None] * D + both[None, :]
            token = tl.load(source, mask=live[:, None], other=0.0, eviction_policy="evict_first")
            tl.store(to_k + both[None, :], token, mask=live[:, None] & (both < D)[None, :])
            tl.store(to_v + both[None, :] - D, token, mask=live[:, None] & (both >= D)[None, :])
        else:
            source = pool_ptr + row[:, None] * D + d[None, :]
            k = tl.load(source, mask=live[:, None], other=0.0, eviction_policy="evict_first")
            v = tl.load(source + behind, mask=live[:, None], other=0.0, eviction_policy="evict_first")
            tl.store(to_k + d[None, :], k, mask=live[:, None])
            tl.store(to_v + d[None, :], v, mask=live[:, None])
