"""k1 over a pool of slots: one softmax over all of a KV head's slots, with an additive bias per query head.

Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, C slots, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvlens.kernels.page_attend import Pages, page_attention_triton

PAGE = 32
"""slots that the kernel takes as one page, fewer where a pool has fewer"""
LEAST_DIM = 16
"""smallest head size that tensor cores multiply"""


def fits(head_dim: int) -> bool:
    """Whether k1 takes this head size."""
    return head_dim >= LEAST_DIM and not head_dim & (head_dim - 1)


def pages_of(keys: torch.Tensor, bias: torch.Tensor) -> tuple[Pages, int]:
    """A pool of any number of slots as page tables, and the slots of a page. keys [H_kv, C, D], bias [H_kv, G, C] float32.

    Slots lie one after the other, so page n is number n in every table. The last page may be shorter; its slots behind C are in no
    `page_len`, so nothing there is read.
    """
    (kv_heads, slots), device = keys.shape[:2], keys.device
    page = min(PAGE, 1 << (slots.bit_length() - 1))
    count = -(-slots // page)
    number = torch.arange(kv_heads * count, dtype=torch.int32, device=device).view(1, kv_heads, count)
    length = torch.full_like(number, page)
    length[..., -1] = slots - (count - 1) * page
    rows = F.pad(bias, (0, count * page - slots)).view(kv_heads, -1, count, page).transpose(1, 2).reshape(kv_heads * count, -1, page)
    live = torch.full((1, kv_heads), count, dtype=torch.int32, device=device)
    return Pages((number % count).contiguous(), length, live, rows, number), page


def paged(pool: torch.Tensor, page: int) -> torch.Tensor:
    """The same memory [H_kv, C, D] as whole pages [C // page, H_kv, page, D]. A shorter last page follows at the same stride: the
    kernel addresses by strides, so a table may name it."""
    return pool.unfold(1, page, page).permute(1, 0, 3, 2)


def pool_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
    """q [1, Hq, 1, D], keys and values [H_kv, C, D], bias [H_kv, G, C] float32 -> [1, Hq, 1, D], by Triton."""
    pages, page = pages_of(keys, bias)
    found = page_attention_triton(q[:, :, 0], paged(keys, page), paged(values, page), pages, scaling, mass=False)
    return found.output[:, :, None]


@torch.library.custom_op(
    "kvlens::pool_attention", mutates_args=(), schema="(Tensor q, Tensor keys, Tensor values, Tensor bias, float scaling) -> Tensor"
)
def _opaque(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
    return pool_attention(q, keys, values, bias, scaling)


@_opaque.register_fake
def _(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
    """`pool_attention`; while torch.compile looks on, as one operation that it does not look into."""
    if torch.compiler.is_compiling():
        return _opaque(q, keys, values, bias, scaling)  # type: ignore[no-any-return]
    return pool_attention(q, keys, values, bias, scaling)
