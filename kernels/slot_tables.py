"""Who attends which slot of a layer, and in which pages somebody attends any: the bias of k1 over a pool of slots, and
its tables.

Between a method's selection and k1 stands what each slot holds: a token, a span's summary, a reconstructed token, or
nothing. PyTorch says in some twenty small operations what that comes to; Triton does it in two launches, so that it
does not bound a captured step. Shapes: H KV heads, G query heads of each, C slots, S spans, P slots of a page, N =
ceil(C / P) pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvlens.kernels.choice import Backend, backend
from kvlens.kernels.compat import power_of_two
from kvlens.kernels.pool_attend import Live, live_pages
from kvlens.kernels.slot_table_kernels import bias_of_slots, table_of_pages

SLOTS = 256
"""slots a program of the first launch takes"""
PAGES = 1024
"""pages a program of the second one takes"""


class Codes(NamedTuple):
    """Role codes that decide: a span's summary, tokens that a selection may hide, a slot that holds nothing. All others
    are attended."""

    coarse: int
    resident: int
    reconstructed: int
    free: int


@dataclass(frozen=True)
class SlotReads:
    """What a layer's slots hold, and who reads what of it."""

    role: torch.Tensor
    """uint8 [H, C], by `codes`"""
    span: torch.Tensor
    """int32 [H, C]: span of the slot's token or summary"""
    position: torch.Tensor
    """int32 [H, C]: of the slot's token"""
    log_lengths: torch.Tensor
    """float32 [S]: log of the tokens that a span's summary stands for"""
    starts: torch.Tensor
    """int32 [S]: a span's first position"""
    selectable: torch.Tensor
    """bool [S]: spans that are attended where `fine` says so"""
    is_hot: torch.Tensor
    """bool [H, S]: spans that are on the device token by token"""
    group: int
    codes: Codes
    fine: torch.Tensor | None
    """bool [H, G, S]: this query head reads the span token by token if it is hot, through its summary otherwise; None:
    nobody selects"""
    tokens: torch.Tensor | None
    """integer [H, G, S]: how many leading tokens of the span are read; None: all of them"""
    positions: torch.Tensor | None = None
    """bool [H, G, P]: positions whose tokens are read at all; None: every one. PyTorch alone knows it"""


def slot_bias(reads: SlotReads) -> torch.Tensor:
    """The bias [H, G, C] float32 in PyTorch: log of the span's length on summaries, -inf on what a query head does not
    attend, 0 elsewhere. Span ids have to be valid in free slots too."""
    role, span, codes = reads.role, reads.span.long(), reads.codes
    summary = role == codes.coarse
    open_bias = torch.where(summary, reads.log_lengths[span], 0.0)
    open_bias = open_bias.masked_fill(role == codes.free, float("-inf"))[:, None]
    hidden = None
    if reads.fine is not None:
        wide = span[:, None].expand(-1, reads.group, -1)
        read = (reads.fine & reads.is_hot[:, None]).gather(2, wide)
        token = ((role == codes.resident) | (role == codes.reconstructed)) & reads.selectable[span]
        of_read, of_unread = summary[:, None], token[:, None]
        if reads.tokens is not None:
            offset = reads.position - reads.starts[span]
            of_read = of_read | (of_unread & (offset[:, None] >= reads.tokens.gather(2, wide)))
        hidden = torch.where(read, of_read, of_unread)
    if reads.positions is not None:
        where = reads.position.long().clamp(min=0)[:, None].expand(-1, reads.group, -1)
        elsewhere = ~(summary[:, None] | reads.positions.gather(2, where))
        hidden = elsewhere if hidden is None else hidden | elsewhere
    if hidden is None:
        return open_bias.repeat(1, reads.group, 1)
    return torch.where(hidden, float("-inf"), open_bias)


def slot_tables(reads: SlotReads, page: int) -> Live:
    """The bias, and the pages of `page` slots (a power of two, at most SLOTS) in which some query head attends some
    slot, as `live_pages` names them. CUDA tensors take Triton where nothing is chosen by position, others PyTorch."""
    return tables_by(backend(reads.role), reads, page)


def tables_by(kernels: Backend, reads: SlotReads, page: int) -> Live:
    """As `slot_tables`, by Triton where it is asked for and knows all of `reads`."""
    return (slot_tables_triton if kernels == "triton" and reads.positions is None else slot_tables_torch)(reads, page)


def slot_tables_torch(reads: SlotReads, page: int) -> Live:
    """The reference; the kernels equal it bit for bit."""
    return live_pages(slot_bias(reads), page)


def slot_tables_triton(reads: SlotReads, page: int) -> Live:
    """Two launches and no atomics: how many pages are live before a program's own ones is known only when all programs
    have counted. Span ids of free slots are never read as addresses."""
    bias, table, page_len, n_page, row = _slot_tables(
        reads.role,
        reads.span,
        reads.position,
        reads.log_lengths,
        reads.starts,
        reads.selectable,
        reads.is_hot,
        reads.fine,
        reads.tokens,
        reads.group,
        page,
        reads.codes,
    )
    return Live(table, page_len, n_page, bias, row)


@torch.library.custom_op(
    "kvlens::slot_tables",
    mutates_args=(),
    schema=(
        "(Tensor role, Tensor span, Tensor position, Tensor log_lengths, Tensor starts, Tensor selectable, "
        "Tensor is_hot, Tensor? fine,"
        " Tensor? tokens, int group, int page, int[] codes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _slot_tables(
    role: torch.Tensor,
    span: torch.Tensor,
    position: torch.Tensor,
    log_lengths: torch.Tensor,
    starts: torch.Tensor,
    selectable: torch.Tensor,
    is_hot: torch.Tensor,
    fine: torch.Tensor | None,
    tokens: torch.Tensor | None,
    group: int,
    page: int,
    codes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> bias [H, G, C] float32, table, page_len [H, N], n_page [H], row [H, N] int32, as `Live`."""
    power_of_two(page=page)
    assert page <= SLOTS
    heads, slots = role.shape
    assert role.stride() == span.stride() == position.stride()
    assert role.stride(1) == log_lengths.stride(0) == starts.stride(0) == selectable.stride(0) == is_hot.stride(1) == 1
    places, blocks = -(-slots // page), -(-slots // SLOTS)
    outputs = _outputs(role, group, page)
    bias, table, page_len, n_page, row = outputs
    attended = torch.empty(heads, places, dtype=torch.uint8, device=role.device)
    count = torch.empty(heads, blocks, dtype=torch.int32, device=role.device)
    flags = [x.view(torch.uint8) for x in (selectable, is_hot)]
    bias_of_slots[(blocks, heads)](
        role,
        span,
        position,
        log_lengths,
        starts,
        *flags,
        None if fine is None else fine.view(torch.uint8),
        tokens,
        bias,
        attended,
        count,
        slots,
        places,
        role.stride(0),
        is_hot.stride(0),
        *((0, 0, 0) if fine is None else fine.stride()),
        *((0, 0, 0) if tokens is None else tokens.stride()),
        G=group,
        P=page,
        BLOCK=SLOTS,
        SELECTS=fine is not None,
        PARTS=fine is not None and tokens is not None,
        COARSE=codes[0],
        RESIDENT=codes[1],
        RECONSTRUCTED=codes[2],
        FREE=codes[3],
        num_warps=4,
        enable_fp_fusion=True,
    )
    table_of_pages[(-(-places // PAGES), heads)](
        attended,
        count,
        table,
        page_len,
        n_page,
        row,
        slots,
        places,
        blocks,
        G=group,
        P=page,
        PER=SLOTS // page,
        BLOCK=PAGES,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return outputs


@_slot_tables.register_fake
def _(
    role: torch.Tensor,
    span: torch.Tensor,
    position: torch.Tensor,
    log_lengths: torch.Tensor,
    starts: torch.Tensor,
    selectable: torch.Tensor,
    is_hot: torch.Tensor,
    fine: torch.Tensor | None,
    tokens: torch.Tensor | None,
    group: int,
    page: int,
    codes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(role, group, page)


def _outputs(
    role: torch.Tensor, group: int, page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, slots = role.shape
    table, page_len, row = (role.new_empty(heads, -(-slots // page), dtype=torch.int32) for _ in range(3))
    n_page = role.new_empty(heads, dtype=torch.int32)
    return role.new_empty(heads, group, slots, dtype=torch.float32), table, page_len, n_page, row
