"""k1 over a pool of slots: one softmax over a KV head's slots, read a page at a time where somebody attends anything.

Sessions and static steps attend through these functions. Which pages are read, and how many, lies in tensors.
Shapes: Hq query heads, H KV heads, G = Hq / H, C slots, N pages of P slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.page_attend import Pages, page_attention_triton

PAGE = 32
"""slots of a page at most, a power of two"""
LEAST_DIM = 16
"""smallest head size that tensor cores multiply"""


def fits(head_dim: int) -> bool:
    """Whether k1 takes this head size."""
    return head_dim >= LEAST_DIM and not head_dim & (head_dim - 1)


def page_of(slots: int) -> int:
    """Slots of a page in a pool of so many: PAGE, or less where the pool is smaller."""
    return 1 << (min(PAGE, slots).bit_length() - 1)


@dataclass(frozen=True)
class Live:
    """What is read of a pool's slots: table, page_len int32 [H, N], n_page int32 [H] as
    kvlens.kernels.page_attend.Pages; the bias [H, G, C], and where in it, counted in numbers, each page's slots begin
    for the first query head (row int32 [H, N]), or neither."""

    table: torch.Tensor
    page_len: torch.Tensor
    n_page: torch.Tensor
    bias: torch.Tensor | None = None
    row: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.table, self.page_len, self.n_page, self.bias, self.row

    def become(self, source: Live) -> None:
        """Take over its numbers, at the addresses of one's own."""
        for target, new in zip(self.tensors(), source.tensors(), strict=True):
            if target is not None and new is not None:
                target.copy_(new)


def live_prefix(count: torch.Tensor, heads: int, slots: int, page: int) -> Live:
    """The first `count` (0-d) of the slots are read, as they are."""
    table = torch.arange(-(-slots // page), dtype=torch.int32, device=count.device).expand(heads, -1).contiguous()
    page_len = (count - table * page).clamp(0, page).int()
    return Live(table, page_len, ((count + page - 1) // page).int().expand(heads).contiguous())


def live_pages(bias: torch.Tensor, page: int) -> Live:
    """Pages with a slot that some query head of the KV head attends, in ascending order; page 0 stands in the rest of
    the table."""
    heads, group, slots = bias.shape
    count = -(-slots // page)
    attended = (
        torch.nn.functional.pad((bias > -torch.inf).any(1), (0, count * page - slots))
        .unflatten(1, (count, page))
        .any(2)
    )
    numbers = torch.arange(count, dtype=torch.int32, device=bias.device).expand(heads, -1)
    place = torch.where(attended, attended.cumsum(1) - 1, count)
    table = (
        torch.zeros(heads, count + 1, dtype=torch.int32, device=bias.device)
        .scatter(1, place, numbers)[:, :count]
        .contiguous()
    )
    row = torch.arange(heads, dtype=torch.int32, device=bias.device)[:, None] * (group * slots) + table * page
    return Live(table, (slots - table * page).clamp(max=page).int(), attended.sum(1).int(), bias, row)


def _as_pages(x: torch.Tensor, page: int) -> torch.Tensor:
    """See keys or values [H, C, D] as pages [C / page, H, page, D]."""
    whole = x.shape[1] // page
    return x[:, : whole * page].unflatten(1, (whole, page)).transpose(0, 1)


def _as_rows(
    bias: torch.Tensor | None, row: torch.Tensor | None, page: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Bias [..., G, C] as rows that begin at any number, and row [..., H, N] with a batch."""
    if bias is None or row is None:
        return None, None
    assert bias.is_contiguous()
    group, slots = bias.shape[-2:]
    return bias.as_strided((1, group, page), (1, slots, 1)), row.view(-1, *row.shape[-2:])


@torch.library.custom_op(
    "kvlens::attend_slots",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor page_len, Tensor n_page, Tensor? bias, "
        "Tensor? row, float scaling,"
        " int page, bool mass) -> (Tensor, Tensor)"
    ),
)
def _attend_slots(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    page_len: torch.Tensor,
    n_page: torch.Tensor,
    bias: torch.Tensor | None,
    row: torch.Tensor | None,
    scaling: float,
    page: int,
    mass: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A custom operator, so that torch.compile takes it as one call. The pool is seen as pages without a copy; the last
    one may be cut short by the end of the pool, where page_len says so.
    """
    paged_keys, paged_values = (_as_pages(x, page) for x in (keys, values))
    pages = Pages(table[None], page_len[None], n_page[None], *_as_rows(bias, row, page))
    result = page_attention_triton(q[None], paged_keys, paged_values, pages, scaling, mass)
    return result.output[0], q.new_empty(0, dtype=torch.float32) if result.mass is None else result.mass[0]


@_attend_slots.register_fake
def _(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    page_len: torch.Tensor,
    n_page: torch.Tensor,
    bias: torch.Tensor | None,
    row: torch.Tensor | None,
    scaling: float,
    page: int,
    mass: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[0], table.shape[1]) if mass else (0,), dtype=torch.float32)


def attend_slots(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, live: Live, scaling: float, page: int, mass: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """k1 on q [Hq, D], keys, values [H, C, D] -> output [Hq, D], mass [Hq, N] in the order of the table, or nothing."""
    result: tuple[torch.Tensor, torch.Tensor] = _attend_slots(q, keys, values, *live.tensors(), scaling, page, mass)
    return result


def pool_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
    live: Live | None = None,
) -> torch.Tensor:
    """q [1, Hq, 1, D], keys and values [H, C, D], bias [H, G, C] float32 -> [1, Hq, 1, D], by Triton. live: this bias
    and its pages of `page_of(C)` slots, where they are known."""
    page = page_of(keys.shape[1])
    out, _ = attend_slots(q[0, :, 0], keys, values, live or live_pages(bias.contiguous(), page), scaling, page, False)
    return out[None, :, None]


def attend_batch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    live: Live,
    scaling: float,
    page: int,
) -> torch.Tensor:
    """k1 of B sequences in one launch: q [B, Hq, D]; keys, values [H, C, D] of the first sequence, offsets int64 [B, 2]
    from there to the others'; live with B as first dimension, rows counted from the first sequence's bias -> [B, Hq,
    D]."""
    pages = Pages(live.table, live.page_len, live.n_page, *_as_rows(live.bias, live.row, page))
    paged_keys, paged_values = (_as_pages(x, page) for x in (keys, values))
    return page_attention_triton(q, paged_keys, paged_values, pages, scaling, mass=False, offsets=offsets).output
