"""The best entries of each row, in order, by one launch: what a sort of whole rows gives, without the sort.

An entry's place is the number of entries that stand before it, which every program counts for some entries of a row.
Tensors only. Shapes: R rows, N entries, W wanted.
"""

from __future__ import annotations

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, tl

MOST = 8192
"""entries of a row that are counted; a longer row is sorted"""
LONG = 2048
"""entries of a row: on a CPU, PyTorch sorts shorter rows, and selects from longer ones without sorting them"""
BLOCK, CHUNK = 32, 256


def best_rows(score: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` highest of each row, best first, the earlier one where two are equal: score [R, N] without NaN
    -> int64 [R, min(count, N)], -1 where nothing above -inf is left. CUDA tensors take Triton, others PyTorch."""
    if backend(score) == "triton" and score.dtype == torch.float32 and score.shape[1] <= MOST:
        return best_rows_triton(score, count)
    return best_rows_torch(score, count)


def best_rows_torch(score: torch.Tensor, count: int) -> torch.Tensor:
    """The reference; the kernel equals it bit for bit."""
    entries = score.shape[-1]
    if score.device.type == "cpu" and score.dtype == torch.float32 and count < entries and entries >= LONG:
        return _selected(score, count)
    order = score.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return order.masked_fill(score.gather(-1, order) == float("-inf"), -1)


def _selected(score: torch.Tensor, count: int) -> torch.Tensor:
    """Return the same rows without sorting all entries. If two of the best are equal, entries are compared by a number
    that holds the score and then the place: the earlier of two equal entries has the larger number."""
    best, order = score.topk(count + 1, dim=-1)
    if ((best[:, 1:] == best[:, :-1]) & (best[:, 1:] > float("-inf"))).any():
        bits = (score + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
        places = torch.arange(score.shape[-1] - 1, -1, -1, device=score.device)
        order = (((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) + places).topk(count, dim=-1).indices
        best = score.gather(-1, order)
    return order[:, :count].masked_fill(best[:, :count] == float("-inf"), -1)


def best_rows_triton(score: torch.Tensor, count: int) -> torch.Tensor:
    """As `best_rows`, of float32."""
    out: torch.Tensor = torch.ops.kvlens.best_rows(score, count)
    return out


@torch.library.custom_op("kvlens::best_rows", mutates_args=(), schema="(Tensor score, int count) -> Tensor")
def _best_rows(score: torch.Tensor, count: int) -> torch.Tensor:
    """A custom operator, so that torch.compile takes it as one call."""
    rows, entries = score.shape
    width = min(count, entries)
    out = torch.empty(rows, width, dtype=torch.long, device=score.device)
    assert score.stride(1) == 1
    _place[(-(-entries // BLOCK), rows)](
        score, out, entries, width, score.stride(0), BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=True
    )
    return out


@_best_rows.register_fake
def _(score: torch.Tensor, count: int) -> torch.Tensor:
    return score.new_empty(score.shape[0], min(count, score.shape[1]), dtype=torch.long)


@jit
def _place(  # type: ignore[no-untyped-def]
    score_ptr, out_ptr, entries, width, score_r, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """One program: the places of BLOCK entries of a row. Every place is one entry's, so each is written once."""
    r = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(score_ptr + r * score_r + i, mask=i < entries, other=float("-inf"))
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, entries, CHUNK):
        j = start + tl.arange(0, CHUNK)
        rival = tl.load(score_ptr + r * score_r + j, mask=j < entries, other=float("-inf"))
        higher = rival[None, :] > value[:, None]
        earlier = (rival[None, :] == value[:, None]) & (j[None, :] < i[:, None])
        place += tl.sum(((higher | earlier) & (j < entries)[None, :]).to(tl.int32), 1)
    named = tl.where(value == float("-inf"), -1, i).to(tl.int64)
    tl.store(out_ptr + r * width + place, named, mask=(i < entries) & (place < width))
