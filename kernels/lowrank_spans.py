"""k3: spans that lie on the device as gated low-rank factors (kernels/lowrank.py has the layout of a unit and the
algebra).

`reconstruct` writes their keys and values into slots, where k1 reads them. `attend` never forms them: q' = (q V_k^T)
g_k, scores q' U_k^T, output ((p U_v) g_v) V_v, so nothing of size n x D is written or read. Each span becomes a part
for kernels/merge.py; the merged LSE turns the part's own LSE into its mass. That is exact because keys are decomposed
after RoPE, where attention reads them.

Shapes: B sequences, Hq query heads, H_kv KV heads, G = Hq / H_kv, S places for spans of one (sequence, KV head), n
tokens of a span, r its ranks, D head size, P entries of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import MIN_DOT, compute, jit, next_power_of_two, power_of_two, round_to, rounding, tl, warps
from kvlens.kernels.lowrank import Factors, unpack


@dataclass(frozen=True)
class Spans:
    """Factors of spans in one buffer.

    flat [elements]: units, back to back or with gaps. meta [B, H_kv, S, 4] int64: where a unit begins in `flat`, tokens
    n, r_k, r_v; n = 0: no span in this place, the rest of its row is not read. max_rank: no rank is larger (it fixes
    the kernels' blocks).
    """

    flat: torch.Tensor
    meta: torch.Tensor
    max_rank: int

    @property
    def block(self) -> int:
        """Columns of the kernels' blocks of factors."""
        return max(MIN_DOT, next_power_of_two(self.max_rank))

    def factors(self, place: int, dim: int) -> tuple[Factors, Factors]:
        """Key and value factors of the span in a place of meta.view(-1, 4)."""
        start, n, rank_k, rank_v = self.meta.view(-1, 4)[place].tolist()
        size = (rank_k + rank_v) * (n + dim + 1)
        return unpack(self.flat[start : start + size], n, rank_k, rank_v, dim)


def reconstruct(spans: Spans, tiles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write tokens of spans into slots. keys, values [slots, H_kv, P, D], any strides but 1 in the last dimension.

    tiles [T, 3] int64: place of the span in meta.view(-1, 4), or -1 for nothing to do; its first token; the slot that
    takes that token and the P - 1 after it, as far as the span goes. CUDA tensors take Triton, others PyTorch.
    """
    (reconstruct_triton if backend(keys) == "triton" else reconstruct_torch)(spans, tiles, keys, values)


def reconstruct_torch(spans: Spans, tiles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """The reference: in the factors' precision, rounded once on the way into the slots."""
    _, kv_heads, places, _ = spans.meta.shape
    for place, first, slot in tiles.tolist():
        if place >= 0:
            for factors, into in zip(spans.factors(place, keys.shape[3]), (keys, values), strict=True):
                tokens = factors.dense()[first : first + keys.shape[2]]
                into[slot, place // places % kv_heads, : len(tokens)] = tokens.to(into.dtype)


def reconstruct_triton(spans: Spans, tiles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Blocks of P rows, so P >= 16."""
    _, kv_heads, places, _ = spans.meta.shape
    page, dim = keys.shape[2:]
    power_of_two(page=page, head_dim=dim)
    if page < MIN_DOT:
        raise ValueError(f"page must be at least {MIN_DOT} for the Triton kernel, not {page}")
    assert keys.stride(3) == values.stride(3) == spans.flat.stride(0) == 1
    assert tiles.is_contiguous()
    assert spans.meta.is_contiguous()
    _reconstruct[(len(tiles), 2)](
        spans.flat,
        spans.meta,
        tiles,
        keys,
        values,
        *keys.stride()[:3],
        *values.stride()[:3],
        HKV=kv_heads,
        S=places,
        P=page,
        D=dim,
        R=spans.block,
        COMPUTE=compute(spans.flat.dtype),
        **rounding(keys.dtype),
        num_warps=warps(max(spans.block, page), dim, spans.flat.dtype),
        enable_fp_fusion=True,
    )


def attend(
    q: torch.Tensor, spans: Spans, reads: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, D]; reads [B, Hq, S] bool: which query head reads which span, None: each reads all -> parts [B, Hq, S,
    D] and their LSE [B, Hq, S], float32, for `merge`: 0 and -inf where a head reads nothing. CUDA tensors take Triton,
    others PyTorch."""
    return (attend_triton if backend(q) == "triton" else attend_torch)(q, spans, reads, scaling)


def attend_torch(
    q: torch.Tensor, spans: Spans, reads: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: reconstructs, then attends; float32 inside, float64 where q is float64."""
    batch, kv_heads, places, _ = spans.meta.shape
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // kv_heads
    parts = torch.zeros(batch, q.shape[1], places, q.shape[2], dtype=wide, device=q.device)
    lses = torch.full(parts.shape[:3], -torch.inf, dtype=wide, device=q.device)
    for b, h, s in (spans.meta[..., 1] > 0).nonzero().tolist():
        heads = slice(h * group, (h + 1) * group)
        units = (
            Factors(f.u.to(wide), f.g.to(wide), f.v.to(wide))
            for f in spans.factors((b * kv_heads + h) * places + s, q.shape[2])
        )
        keys, values = (unit.dense() for unit in units)
        scores = q[b, heads].to(wide) @ keys.T * scaling
        parts[b, heads, s], lses[b, heads, s] = scores.softmax(-1) @ values, scores.logsumexp(-1)
    if reads is not None:
        parts, lses = parts.masked_fill(~reads[..., None], 0), lses.masked_fill(~reads, -torch.inf)
    return parts, lses


def attend_triton(
    q: torch.Tensor, spans: Spans, reads: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, kv_heads, places, _ = spans.meta.shape
    heads, dim = q.shape[1:]
    group = heads // kv_heads
    power_of_two(head_dim=dim)
    assert q.stride(2) == spans.flat.stride(0) == 1
    assert spans.meta.is_contiguous()
    assert reads is None or reads.is_contiguous()
    parts = torch.empty(batch, heads, places, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(batch, heads, places, dtype=torch.float32, device=q.device)
    _attend[(batch * kv_heads, places)](
        q,
        spans.flat,
        spans.meta,
        None if reads is None else reads.view(torch.uint8),
        parts,
        lses,
        scaling,
        q.stride(0),
        q.stride(1),
        HKV=kv_heads,
        G=group,
        S=places,
        GP=max(MIN_DOT, next_power_of_two(group)),
        D=dim,
        R=spans.block,
        T=32,
        MASKED=reads is not None,
        COMPUTE=compute(spans.flat.dtype),
        num_warps=warps(spans.block, dim, spans.flat.dtype),
        enable_fp_fusion=True,
    )
    return parts, lses


@jit
def _reconstruct(  # type: ignore[no-untyped-def]
    flat_ptr,
    meta_ptr,
    tile_ptr,
    k_ptr,
    v_ptr,
    k_slot,
    k_h,
    k_t,
    v_slot,
    v_h,
    v_t,
    HKV: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    COMPUTE: tl.constexpr,
    TO: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """One program: the keys (program_id(1) = 0) or the values of one tile."""
    tile = tile_ptr + tl.program_id(0) * 3
    which = tl.program_id(1)
    place = tl.load(tile)
    if place >= 0:
        first = tl.load(tile + 1)
        slot = tl.load(tile + 2)
        h = place // S % HKV
        n = tl.load(meta_ptr + place * 4 + 1)
        rank_k = tl.load(meta_ptr + place * 4 + 2)
        rank = tl.load(meta_ptr + place * 4 + 2 + which)
        u_ptr = flat_ptr + tl.load(meta_ptr + place * 4) + which * (rank_k * (n + D + 1))
        t = tl.arange(0, P)
        r = tl.arange(0, R)
        d = tl.arange(0, D)
        token = first + t
        live = token < n
        there = r < rank
        u = tl.load(u_ptr + token[:, None] * rank + r[None, :], mask=live[:, None] & there[None, :], other=0.0).to(
            tl.float32
        )
        g = tl.load(u_ptr + n * rank + r, mask=there, other=0.0).to(tl.float32)
        v = tl.load(u_ptr + (n + 1) * rank + r[:, None] * D + d[None, :], mask=there[:, None], other=0.0).to(COMPUTE)
        x = round_to(tl.dot((u * g[None, :]).to(COMPUTE), v, input_precision="ieee"), TO, BY_HAND)
        if which == 0:
            tl.store(k_ptr + slot * k_slot + h * k_h + t[:, None] * k_t + d[None, :], x, mask=live[:, None])
        else:
            tl.store(v_ptr + slot * v_slot + h * v_h + t[:, None] * v_t + d[None, :], x, mask=live[:, None])


@jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    flat_ptr,
    meta_ptr,
    reads_ptr,
    part_ptr,
    lse_ptr,
    scaling,
    q_b,
    q_h,
    HKV: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    MASKED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: one span and the query heads of its group; T tokens at a time, online softmax in base 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    bh = tl.program_id(0).to(tl.int64)
    place = bh * S + tl.program_id(1)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    r = tl.arange(0, R)
    real = g < G
    row = (bh * G + g) * S + tl.program_id(1)  # heads of a group follow one another
    n = tl.load(meta_ptr + place * 4 + 1)
    read = real & (n > 0)
    if MASKED:
        read = read & (tl.load(reads_ptr + row, mask=real, other=0) != 0)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, D), tl.float32)
    if n > 0:
        start = tl.load(meta_ptr + place * 4)
        rank_k = tl.load(meta_ptr + place * 4 + 2)
        rank_v = tl.load(meta_ptr + place * 4 + 3)
        k_u = flat_ptr + start
        k_g = k_u + n * rank_k
        v_u = k_u + rank_k * (n + D + 1)
        v_g = v_u + n * rank_v
        in_k = r < rank_k
        in_v = r < rank_v
        q_at = (bh // HKV) * q_b + (bh % HKV * G + g)[:, None] * q_h + d[None, :]
        q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0).to(COMPUTE)
        k_v = tl.load(k_g + rank_k + r[:, None] * D + d[None, :], mask=in_k[:, None], other=0.0).to(COMPUTE)
        gate = tl.load(k_g + r, mask=in_k, other=0.0).to(tl.float32) * (scaling * LOG2E)
        low = tl.dot(q, tl.trans(k_v), input_precision="ieee") * gate[None, :]
        mixed = tl.zeros((GP, R), tl.float32)
        for first in range(0, n, T):
            t = first + tl.arange(0, T)
            live = t < n
            u = tl.load(k_u + t[:, None] * rank_k + r[None, :], mask=live[:, None] & in_k[None, :], other=0.0).to(
                tl.float32
            )
            # not rounded to bf16 here: an error of `low` is an error of the score itself, 2^-9 of a score of 20 is 4
            # percent
            s = tl.dot(low, tl.trans(u), input_precision="tf32x3")
            s = tl.where(live[None, :], s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            fade = tl.exp2(top - new_top)
            weight = tl.exp2(s - new_top[:, None])
            total = total * fade + tl.sum(weight, 1)
            w = tl.load(v_u + t[:, None] * rank_v + r[None, :], mask=live[:, None] & in_v[None, :], other=0.0).to(
                COMPUTE
            )
            mixed = mixed * fade[:, None] + tl.dot(weight.to(COMPUTE), w, input_precision="ieee")
            top = new_top
        mixed = mixed * tl.load(v_g + r, mask=in_v, other=0.0).to(tl.float32)[None, :] / total[:, None]
        v_v = tl.load(v_g + rank_v + r[:, None] * D + d[None, :], mask=in_v[:, None], other=0.0).to(COMPUTE)
        out = tl.dot(mixed.to(COMPUTE), v_v, input_precision="ieee")
    lse = tl.where(read, (top + tl.log2(total)) * LN2, float("-inf"))
    tl.store(part_ptr + row[:, None] * D + d[None, :], tl.where(read[:, None], out, 0.0), mask=real[:, None])
    tl.store(lse_ptr + row, lse, mask=real)
