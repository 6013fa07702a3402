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
from kvlens.kernels.compat import MIN_DOT, compute, next_power_of_two, power_of_two, rounding, warps
from kvlens.kernels.lowrank import Factors, unpack
from kvlens.lab.gpu.kernels.lowrank_kernels import attend_span, rebuild_tile


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
    for place, first_token, slot in tiles.tolist():
        if place >= 0:
            for factors, into in zip(spans.factors(place, keys.shape[3]), (keys, values), strict=True):
                tokens = factors.dense()[first_token : first_token + keys.shape[2]]
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
    rebuild_tile[(len(tiles), 2)](
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
    attend_span[(batch * kv_heads, places)](
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
