"""The kernels of matvec.py: one vector by plain products, several by tensor cores, and the norm that stands
before these. Shapes: as there."""

from __future__ import annotations

from kvlens.kernels.compat import jit, round_to, tl


@jit
def of_one(  # type: ignore[no-untyped-def]
    x_ptr,
    matrix_ptr,
    norm_ptr,
    add_ptr,
    out_ptr,
    epsilon,
    outputs,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    TO: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """One program: BN outputs. Weights are read an iteration ahead, so that two tiles are on their way; products stay
    apart until the end, where they are added up once."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    real = (n < outputs)[:, None]
    address = matrix_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    behind = outputs.to(tl.int64) * K
    total = tl.zeros((BN, BK), tl.float32)
    second = tl.zeros((BN, BK), tl.float32)
    square = tl.zeros((BK,), tl.float32)
    inside = real & (k < K)[None, :]
    w_next = tl.load(address, mask=inside, other=0.0, eviction_policy="evict_first")
    if GATED:
        u_next = tl.load(address + behind, mask=inside, other=0.0, eviction_policy="evict_first")
    for start in range(0, K, BK):
        w = w_next.to(tl.float32)
        if GATED:
            u = u_next.to(tl.float32)
        ahead = real & (start + BK + k < K)[None, :]
        w_next = tl.load(address + start + BK, mask=ahead, other=0.0, eviction_policy="evict_first")
        if GATED:
            u_next = tl.load(address + behind + start + BK, mask=ahead, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            square += x * x
            x = x * tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        total += w * x[None, :]
        if GATED:
            second += u * x[None, :]
    out = tl.sum(total, 1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(square, 0) / K + epsilon)
        out = out * scale
    if GATED:
        up = tl.sum(second, 1)
        if NORM:
            up = up * scale
        out = out / (1.0 + tl.exp(-out)) * up
    if ADD:
        out += tl.load(add_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, round_to(out, TO, BY_HAND), mask=n < outputs)


@jit
def of_several(  # type: ignore[no-untyped-def]
    x_ptr,
    matrix_ptr,
    add_ptr,
    out_ptr,
    outputs,
    x_b,
    add_b,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    COMPUTE: tl.constexpr,
    TO: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """One program: BN outputs of all B vectors, padded to BP rows."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    b = tl.arange(0, BP)
    real = (n < outputs)[:, None]
    address = matrix_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    behind = outputs.to(tl.int64) * K
    total = tl.zeros((BP, BN), tl.float32)
    second = tl.zeros((BP, BN), tl.float32)
    for start in range(0, K, BK):
        here = (start + k < K)[None, :]
        x = tl.load(x_ptr + b[:, None] * x_b + start + k[None, :], mask=(b < B)[:, None] & here, other=0.0)
        x = x.to(COMPUTE)
        w = tl.load(address + start, mask=real & here, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        total = tl.dot(x, tl.trans(w), acc=total, input_precision="ieee")
        if GATED:
            u = tl.load(address + behind + start, mask=real & here, other=0.0, eviction_policy="evict_first")
            second = tl.dot(x, tl.trans(u.to(COMPUTE)), acc=second, input_precision="ieee")
    out = total
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * second
    inside = (b < B)[:, None] & (n < outputs)[None, :]
    if ADD:
        out += tl.load(add_ptr + b[:, None] * add_b + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + b[:, None] * outputs + n[None, :], round_to(out, TO, BY_HAND), mask=inside)


@jit
def norm_rows(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, epsilon, x_b, K: tl.constexpr, KP: tl.constexpr, TO: tl.constexpr, BY_HAND: tl.constexpr
):
    """One program: a vector."""
    b = tl.program_id(0)
    k = tl.arange(0, KP)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + b * x_b + k, mask=k < K, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + epsilon)
    tl.store(out_ptr + b * K + k, round_to(x * scale * weight, TO, BY_HAND), mask=k < K)
