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


def best_rows(score: torch.Tensor, count: int, ids: torch.Tensor | None = None, first_id: int = 0) -> torch.Tensor:
    """Return the `count` highest of each row, best first, the earlier one where two are equal: score [R, N] without NaN
    -> int64 [R, min(count, N)], -1 where nothing above -inf is left. ids int64 [N]: what to call the entries, None: by
    their numbers, from `first_id` on. CUDA tensors take Triton, others PyTorch."""
    if counts(score):
        return best_rows_triton(score, count, ids, first_id)
    return best_rows_torch(score, count, ids, first_id)


def counts(score: torch.Tensor) -> bool:
    """Whether the kernel takes these rows."""
    return backend(score) == "triton" and score.dtype == torch.float32 and score.shape[1] <= MOST


def best_rows_torch(
    score: torch.Tensor, count: int, ids: torch.Tensor | None = None, first_id: int = 0
) -> torch.Tensor:
    """The reference; the kernel equals it bit for bit."""
    entries = score.shape[-1]
    if score.device.type == "cpu" and score.dtype == torch.float32 and count < entries and entries >= LONG:
        best = _selected(score, count)
    else:
        order = score.argsort(dim=-1, descending=True, stable=True)[:, :count]
        best = order.masked_fill(score.gather(-1, order) == float("-inf"), -1)
    if ids is None and not first_id:
        return best
    names = best + first_id if ids is None else ids[best.clamp(min=0)]
    return names.masked_fill(best < 0, -1)


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


def best_rows_triton(
    score: torch.Tensor, count: int, ids: torch.Tensor | None = None, first_id: int = 0
) -> torch.Tensor:
    """As `best_rows`, of float32."""
    out: torch.Tensor = torch.ops.kvlens.best_rows(score, count, ids, first_id)
    return out


@torch.library.custom_op(
    "kvlens::best_rows", mutates_args=(), schema="(Tensor score, int count, Tensor? ids, int first_id) -> Tensor"
)
def _best_rows(score: torch.Tensor, count: int, ids: torch.Tensor | None, first_id: int) -> torch.Tensor:
    """A custom operator, so that torch.compile takes it as one call."""
    rows, entries = score.shape
    width = min(count, entries)
    out = torch.empty(rows, width, dtype=torch.long, device=score.device)
    assert score.stride(1) == 1
    assert ids is None or ids.is_contiguous()
    _place[(-(-entries // BLOCK), rows)](
        score,
        ids,
        out,
        entries,
        width,
        first_id,
        score.stride(0),
        NAMED=ids is not None,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@_best_rows.register_fake
def _(score: torch.Tensor, count: int, ids: torch.Tensor | None, first_id: int) -> torch.Tensor:
    return score.new_empty(score.shape[0], min(count, score.shape[1]), dtype=torch.long)


@jit
def _place(  # type: ignore[no-untyped-def]
    score_ptr,
    ids_ptr,
    out_ptr,
    entries,
    width,
    first_id,
    score_r,
    NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: the places of BLOCK entries of a row. Every place is one entry's, so each is written once. An entry
    stands behind equal ones of the chunks before its own, and before those of the chunks behind."""
    r = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK
    chunk = block // CHUNK * CHUNK
    i = block + tl.arange(0, BLOCK)
    j = tl.arange(0, CHUNK)
    value = tl.load(score_ptr + r * score_r + i, mask=i < entries, other=float("-inf"))
    higher = tl.zeros((BLOCK, CHUNK), tl.int32)
    for start in range(0, chunk, CHUNK):
        rival = tl.load(score_ptr + r * score_r + start + j)
        higher += (rival[None, :] >= value[:, None]).to(tl.int32)
    rival = tl.load(score_ptr + r * score_r + chunk + j, mask=chunk + j < entries, other=float("-inf"))
    earlier = (rival[None, :] == value[:, None]) & ((chunk + j)[None, :] < i[:, None])
    higher += ((rival[None, :] > value[:, None]) | earlier).to(tl.int32)
    for start in range(chunk + CHUNK, entries, CHUNK):
        rival = tl.load(score_ptr + r * score_r + start + j, mask=start + j < entries, other=float("-inf"))
        higher += (rival[None, :] > value[:, None]).to(tl.int32)
    place = tl.sum(higher, 1)
    name = i.to(tl.int64) + first_id
    if NAMED:
        name = tl.load(ids_ptr + i, mask=i < entries, other=-1)
    named = tl.where(value == float("-inf"), -1, name)
    tl.store(out_ptr + r * width + place, named, mask=(i < entries) & (place < width))
