"""Queries, keys and values of a decode step behind their product: keys and queries turned by their position, keys and
values written into their slots, in one launch.

Shapes: B sequences, Hq query heads, H KV heads, C slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, power_of_two, round_to, rounding, tl


@dataclass(frozen=True)
class Places:
    """Where the tokens of B sequences are written. keys, values [H, C, D]: slots of the first sequence, 1 the stride of
    the last dimension; slot int64 [B, H], any strides: the slot of each sequence's token; offsets int64 [B, 2]: how
    many numbers behind the first sequence's keys and values the others' slots lie, None for one sequence."""

    keys: torch.Tensor
    values: torch.Tensor
    slot: torch.Tensor
    offsets: torch.Tensor | None = None


def rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    """Turn and write the token of one sequence: qkv [1, (Hq + 2 H) D] holds queries, keys, values; cos, sin [1, D];
    slot int64 [H]; keys, values as in Places -> the turned queries [1, Hq, D]. CUDA tensors take Triton, others
    PyTorch."""
    out: torch.Tensor = torch.ops.kvlens.rotary_write(qkv, cos, sin, keys, values, slot)
    return out


def rotary_write_torch(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, to: Places) -> torch.Tensor:
    """The reference, of one sequence: float32 inside, float64 where qkv is float64."""
    assert to.offsets is None
    kv_heads, _, dim = to.keys.shape
    wide = qkv.dtype if qkv.dtype == torch.float64 else torch.float32
    rows = qkv.view(-1, dim).to(wide)
    lower, upper = rows.chunk(2, -1)
    turned = rows * cos.to(wide) + torch.cat((-upper, lower), -1) * sin.to(wide)
    queries = len(rows) - 2 * kv_heads
    head = torch.arange(kv_heads, device=qkv.device)
    to.keys[head, to.slot[0]] = turned[queries : queries + kv_heads].to(to.keys.dtype)
    to.values[head, to.slot[0]] = rows[queries + kv_heads :].to(to.values.dtype)
    return turned[None, :queries].to(qkv.dtype)


def rotary_write_triton(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, to: Places) -> torch.Tensor:
    """The token of each sequence, qkv [B, (Hq + 2 H) D], cos, sin [B, D] -> [B, Hq, D]."""
    batch, (kv_heads, _, dim) = len(qkv), to.keys.shape
    heads = qkv.shape[1] // dim
    power_of_two(head_dim=dim)
    assert batch == 1 or to.offsets is not None
    assert qkv.stride(1) == cos.stride(1) == sin.stride(1) == to.keys.stride(2) == to.values.stride(2) == 1
    assert cos.stride(0) == sin.stride(0)
    assert to.slot.shape == (batch, kv_heads)
    out = torch.empty(batch, heads - 2 * kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    _turn[(batch, heads)](
        qkv,
        cos,
        sin,
        out,
        to.keys,
        to.values,
        to.slot,
        to.offsets,
        qkv.stride(0),
        cos.stride(0),
        *to.keys.stride()[:2],
        *to.values.stride()[:2],
        *to.slot.stride(),
        HQ=heads - 2 * kv_heads,
        HKV=kv_heads,
        HALF=dim // 2,
        OFFSETS=to.offsets is not None,
        **rounding(qkv.dtype),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out


@torch.library.custom_op(
    "kvlens::rotary_write",
    mutates_args=("keys", "values"),
    schema=("(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor slot) -> Tensor"),
)
def _rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    """A custom operator, so that torch.compile takes it as one call."""
    way = rotary_write_triton if backend(qkv) == "triton" else rotary_write_torch
    return way(qkv, cos, sin, Places(keys, values, slot[None]))


@_rotary_write.register_fake
def _(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    dim = keys.shape[2]
    return qkv.new_empty(len(qkv), qkv.shape[1] // dim - 2 * keys.shape[0], dim)


@jit
def _turn(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    offset_ptr,
    qkv_b,
    cos_b,
    k_h,
    k_s,
    v_h,
    v_s,
    slot_b,
    slot_h,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    HALF: tl.constexpr,
    OFFSETS: tl.constexpr,
    TO: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """One program: a head of a sequence. Query heads first, then keys, then values."""
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    source = qkv_ptr + b * qkv_b + head * (2 * HALF) + d
    lower = tl.load(source).to(tl.float32)
    upper = tl.load(source + HALF).to(tl.float32)
    if head < HQ + HKV:
        turn = b * cos_b + d
        cos_1 = tl.load(cos_ptr + turn).to(tl.float32)
        cos_2 = tl.load(cos_ptr + turn + HALF).to(tl.float32)
        sin_1 = tl.load(sin_ptr + turn).to(tl.float32)
        sin_2 = tl.load(sin_ptr + turn + HALF).to(tl.float32)
        turned = lower * cos_1 - upper * sin_1
        upper = upper * cos_2 + lower * sin_2
        lower = turned
    a = round_to(lower, TO, BY_HAND)
    z = round_to(upper, TO, BY_HAND)
    if head < HQ:
        to = q_ptr + (b * HQ + head) * (2 * HALF) + d
        tl.store(to, a)
        tl.store(to + HALF, z)
    else:
        h = (head - HQ) % HKV
        slot = tl.load(slot_ptr + b * slot_b + h * slot_h)
        if head < HQ + HKV:
            to = k_ptr + h * k_h + slot * k_s + d
            if OFFSETS:
                to += tl.load(offset_ptr + 2 * b)
        else:
            to = v_ptr + h * v_h + slot * v_s + d
            if OFFSETS:
                to += tl.load(offset_ptr + 2 * b + 1)
        tl.store(to, a)
        tl.store(to + HALF, z)
