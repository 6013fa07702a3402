"""k4: moving pages between host memory and slots, with the change of layout on the way.

A unit is the keys and values of one (page, KV head). In host memory it is one stretch of the pool [pages, H_kv, 2, P,
D] (HND: evidence/kernels.md, Sources), and a unit's number is page * H_kv + head. On the device a page lies in a slot,
token-major or head-major: whatever the strides of the tensors say. Numbers are moved as they are, bit for bit.

On CUDA the pool is pinned host memory that the kernel reads and writes in place: no call per unit, no list on the host,
and it can be captured in a CUDA graph. Bytes moved, exactly: units that are not -1, times 2 * P * D * element size.
Shapes: H_kv KV heads, P entries of a page, D head size, n moves.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, power_of_two, tl

THREAD_BYTES = 16
"""a thread reads at once at most"""
CTAS = 12
"""Programs that copy, so SMs that the forward pass goes without at most: where vLLM's copy kernel starts (vllm #42212),
not tuned."""
TOKENS = 16
"""units of one token that a program has under way at once"""


def gather(
    pool: torch.Tensor, unit: torch.Tensor, slot: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Recall: copy units into slots.

    pool [pages, H_kv, 2, P, D], contiguous; unit, slot int32 of equal shape, unit -1: no move; no two moves into one
    (slot, head); slot None: a unit's slot is its place in its row.
    keys, values [slots, H_kv, P, D], any strides but 1 in the last dimension. Slots on CUDA take Triton, others
    PyTorch.
    """
    if backend(keys) == "triton":
        move_triton(pool, unit, slot, keys, values, to_pool=False)
    else:
        gather_torch(pool, unit, slot, keys, values)


def offload(
    pool: torch.Tensor, unit: torch.Tensor, slot: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """The way back: copy slots into units. No two moves into one unit. Otherwise as `gather`."""
    if backend(keys) == "triton":
        move_triton(pool, unit, slot, keys, values, to_pool=True)
    else:
        offload_torch(pool, unit, slot, keys, values)


def gather_torch(
    pool: torch.Tensor, unit: torch.Tensor, slot: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> None:
    unit, slot, head = _moves(unit, slot, pool.shape[1])
    units = pool.flatten(0, 1)[unit]
    keys[slot, head], values[slot, head] = units[:, 0], units[:, 1]


def offload_torch(
    pool: torch.Tensor, unit: torch.Tensor, slot: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> None:
    unit, slot, head = _moves(unit, slot, pool.shape[1])
    pool.flatten(0, 1)[unit] = torch.stack((keys[slot, head], values[slot, head]), 1)


def _moves(
    unit: torch.Tensor, slot: torch.Tensor | None, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The moves that are any, as indices: unit, slot, head, each [m]."""
    if slot is None:
        slot = torch.arange(unit.shape[-1], device=unit.device).expand_as(unit)
    real = unit >= 0
    unit, slot = unit[real].long(), slot[real].long()
    return unit, slot, unit % kv_heads


def move_triton(
    pool: torch.Tensor,
    unit: torch.Tensor,
    slot: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    to_pool: bool,
    ctas: int = CTAS,
) -> None:
    """Both directions: `ctas` programs take the moves in turn. A pool in host memory has to be pinned when the slots
    are on CUDA (Triton refuses another)."""
    kv_heads, _, page, dim = pool.shape[1:]
    power_of_two(page=page, head_dim=dim)
    assert pool.is_contiguous()
    assert unit.is_contiguous()
    assert slot is None or slot.is_contiguous()
    assert keys.stride(3) == values.stride(3) == 1
    if page == 1 and not to_pool:
        _gather_tokens[(min(ctas, -(-unit.numel() // TOKENS)),)](
            pool,
            unit,
            slot,
            keys,
            values,
            unit.numel(),
            unit.shape[-1],
            *keys.stride()[:2],
            *values.stride()[:2],
            HKV=kv_heads,
            D=dim,
            N=TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
        )
        return
    _move[(min(ctas, unit.numel()),)](
        pool,
        unit,
        slot,
        keys,
        values,
        unit.numel(),
        unit.shape[-1],
        *keys.stride()[:3],
        *values.stride()[:3],
        HKV=kv_heads,
        P=page,
        D=dim,
        TO_POOL=to_pool,
        num_warps=_warps(page * dim * pool.element_size()),
        enable_fp_fusion=True,
    )


def _warps(size: int) -> int:
    """Warps for keys or values of `size` bytes: with more of them than a small unit fills, each thread would read a
    number or two."""
    return max(1, min(4, size // (32 * THREAD_BYTES)))


@jit
def _move(  # type: ignore[no-untyped-def]
    pool_ptr,
    unit_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    moves,
    row,
    k_slot,
    k_h,
    k_t,
    v_slot,
    v_h,
    v_t,
    HKV: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """One program: every num_programs-th move. Keys and values are read before either is written: more bytes under way
    at once."""
    t = tl.arange(0, P)
    d = tl.arange(0, D)
    inner = t[:, None] * D + d[None, :]
    for i in range(tl.program_id(0), moves, tl.num_programs(0)):
        unit = tl.load(unit_ptr + i).to(tl.int64)
        if unit >= 0:
            if slot_ptr is None:
                slot = (i % row).to(tl.int64)
            else:
                slot = tl.load(slot_ptr + i).to(tl.int64)
            h = unit % HKV
            unit_k = pool_ptr + unit * (2 * P * D) + inner
            unit_v = unit_k + P * D
            slot_k = k_ptr + slot * k_slot + h * k_h + t[:, None] * k_t + d[None, :]
            slot_v = v_ptr + slot * v_slot + h * v_h + t[:, None] * v_t + d[None, :]
            if TO_POOL:
                k = tl.load(slot_k)
                v = tl.load(slot_v)
                tl.store(unit_k, k)
                tl.store(unit_v, v)
            else:
                k = tl.load(unit_k, eviction_policy="evict_first")
                v = tl.load(unit_v, eviction_policy="evict_first")
                tl.store(slot_k, k)
                tl.store(slot_v, v)


@jit
def _gather_tokens(  # type: ignore[no-untyped-def]
    pool_ptr,
    unit_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    moves,
    row,
    k_slot,
    k_h,
    v_slot,
    v_h,
    HKV: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """The gather of units of one token, whose keys and values lie side by side. One program: N moves at a time, every
    num_programs-th N of them, each read as one row; the list is read an iteration ahead."""
    both = tl.arange(0, 2 * D)
    step = tl.num_programs(0) * N
    ahead = tl.program_id(0) * N + tl.arange(0, N)
    next_unit = tl.load(unit_ptr + ahead, mask=ahead < moves, other=-1)
    for start in range(tl.program_id(0) * N, moves, step):
        i = start + tl.arange(0, N)
        unit = next_unit.to(tl.int64)
        live = unit >= 0
        next_unit = tl.load(unit_ptr + i + step, mask=i + step < moves, other=-1)
        if slot_ptr is None:
            slot = (i % row).to(tl.int64)
        else:
            slot = tl.load(slot_ptr + i, mask=live, other=0).to(tl.int64)
        h = unit % HKV
        source = pool_ptr + unit[:, None] * (2 * D) + both[None, :]
        token = tl.load(source, mask=live[:, None], other=0.0, eviction_policy="evict_first")
        to_k = k_ptr + (slot * k_slot + h * k_h)[:, None] + both[None, :]
        to_v = v_ptr + (slot * v_slot + h * v_h)[:, None] + both[None, :] - D
        tl.store(to_k, token, mask=live[:, None] & (both < D)[None, :])
        tl.store(to_v, token, mask=live[:, None] & (both >= D)[None, :])
