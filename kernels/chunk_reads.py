"""Which tokens of ranked chunks are read, up to a number of tokens: all of the best chunks, and of the last one its
first tokens.

PyTorch says it in a dozen small operations; one launch does it here, so that it does not bound a captured step.
Tensors only. Shapes: H KV heads, C rows of the chunk tables, S span ids; the span id of row c is first_id + c.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, tl

BLOCK = 1024
"""rows or span ids taken at a time"""


class ChunkReads(NamedTuple):
    """tokens int64 [H, S]: leading tokens that are read of each span, 0 for spans that are no chunks; fine bool [H, S]:
    spans of which any are; wishes int64 [H, C]: their ids, best first, -1 behind them."""

    tokens: torch.Tensor
    fine: torch.Tensor
    wishes: torch.Tensor


def chunk_reads(order: torch.Tensor, lengths: torch.Tensor, quota: torch.Tensor, first_id: int) -> ChunkReads:
    """Read `quota` (int64 [1]) tokens of the chunks in `order` int64 [H, C]: rows, best first, -1 from where no chunk
    is left. lengths int64 [C]: tokens of each row's chunk; first_id: span id of row 0. CUDA tensors take Triton, others
    PyTorch."""
    take = chunk_reads_triton if backend(order) == "triton" else chunk_reads_torch
    return take(order, lengths, quota, first_id)


def chunk_reads_torch(order: torch.Tensor, lengths: torch.Tensor, quota: torch.Tensor, first_id: int) -> ChunkReads:
    """The reference; the kernel equals it bit for bit."""
    rows = order.clamp(min=0)
    length = lengths[rows].masked_fill(order < 0, 0)
    count = (quota - (length.cumsum(-1) - length)).clamp(min=0).minimum(length)
    tokens = order.new_zeros(len(order), first_id + order.shape[1])
    tokens[:, first_id:].scatter_add_(1, rows, count)
    return ChunkReads(tokens, tokens > 0, (order + first_id).masked_fill(count == 0, -1))


def chunk_reads_triton(order: torch.Tensor, lengths: torch.Tensor, quota: torch.Tensor, first_id: int) -> ChunkReads:
    """As `chunk_reads`."""
    return ChunkReads(*torch.ops.kvlens.chunk_reads(order, lengths, quota, first_id))


# A custom operator, so that torch.compile takes it as one call.
@torch.library.custom_op(
    "kvlens::chunk_reads",
    mutates_args=(),
    schema="(Tensor order, Tensor lengths, Tensor quota, int first_id) -> (Tensor, Tensor, Tensor)",
)
def _chunk_reads(
    order: torch.Tensor, lengths: torch.Tensor, quota: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert order.is_contiguous()
    assert lengths.is_contiguous()
    tokens, fine, wishes = outputs = _outputs(order, first_id)
    heads, rows = order.shape
    _read[(heads,)](
        order,
        lengths,
        quota,
        tokens,
        fine.view(torch.uint8),
        wishes,
        rows,
        first_id + rows,
        first_id,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return outputs


@_chunk_reads.register_fake
def _(
    order: torch.Tensor, lengths: torch.Tensor, quota: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(order, first_id)


def _outputs(order: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, rows = order.shape
    tokens = order.new_empty(heads, first_id + rows)
    return tokens, torch.empty_like(tokens, dtype=torch.bool), torch.empty_like(order)


@jit
def _read(  # type: ignore[no-untyped-def]
    order_ptr, lengths_ptr, quota_ptr, tokens_ptr, fine_ptr, wishes_ptr, rows, spans, first_id, BLOCK: tl.constexpr
):
    """One program: a KV head. Nothing is read any more once the tokens are used up."""
    h = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    none = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, spans, BLOCK):
        s = start + block
        tl.store(tokens_ptr + h * spans + s, none, mask=s < spans)
        tl.store(fine_ptr + h * spans + s, none.to(tl.uint8), mask=s < spans)
    tl.debug_barrier()  # zeros are written before what is read is
    room = tl.load(quota_ptr)
    for start in range(0, rows, BLOCK):
        i = start + block
        wish = none - 1
        if room > 0:
            row = tl.load(order_ptr + h * rows + i, mask=i < rows, other=-1)
            length = tl.load(lengths_ptr + row, mask=row >= 0, other=0)
            end_before = tl.cumsum(length, 0) - length
            count = tl.minimum(tl.maximum(room - end_before, 0), length)
            room -= tl.sum(length, 0)
            read = count > 0
            tl.store(tokens_ptr + h * spans + first_id + row, count, mask=read)
            tl.store(fine_ptr + h * spans + first_id + row, read.to(tl.uint8), mask=read)
            wish = tl.where(read, row + first_id, -1)
        tl.store(wishes_ptr + h * rows + i, wish, mask=i < rows)
