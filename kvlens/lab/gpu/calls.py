"""Full attention by the libraries, and k1 over the same storage: one call each, on keys and values [B, H_kv, N, D]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kvlens.kernels.page_attend import Pages, page_attention
from kvlens.lab.gpu.device import Step
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.part import Bench

Library = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def full_pages(batch: int, kv_heads: int, tokens: int, device: torch.device) -> Pages:
    """The table of a whole context that lies head-major: the pages of (b, h) follow one another."""
    count = tokens // PAGE
    start = torch.arange(batch, dtype=torch.int32) * (kv_heads * count)
    table = (start[:, None, None] + torch.arange(count, dtype=torch.int32)).expand(batch, kv_heads, count).contiguous()
    lengths = torch.full((batch, kv_heads, count), PAGE, dtype=torch.int32)
    return Pages(
        table.to(device), lengths.to(device), torch.full((batch, kv_heads), count, dtype=torch.int32, device=device)
    )


def paged(x: torch.Tensor) -> torch.Tensor:
    """[B, H_kv, N, D] as slots [., H_kv, 32, D] without a copy: slot b * H_kv * N / 32 + page. Slots overlap; tables do
    not."""
    batch, kv_heads, tokens, dim = x.shape
    slots = (batch - 1) * kv_heads * (tokens // PAGE) + tokens // PAGE
    return x.as_strided((slots, kv_heads, PAGE, dim), (PAGE * dim, tokens * dim, dim, 1))


def k1(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: Pages, mass: bool = False) -> torch.Tensor:
    """k1 on [slots, H_kv, P, D]."""
    return page_attention(q, keys, values, pages, q.shape[-1] ** -0.5, mass).output


def sdpa(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """q [B, Hq, D], keys and values [B, H_kv, N, D] -> [B, Hq, D]."""
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As `sdpa`, through compiled flex_attention; each shape is compiled once."""
    return _compiled_flex()(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def context(bench: Bench, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query [1, Hq, D], and keys and values [1, H_kv, N, D]."""
    kv, normal = bench.model.kv, bench.device.normal
    keys, values = (normal(1, kv.kv_heads, tokens, kv.head_dim) for _ in range(2))
    return normal(1, kv.q_heads, kv.head_dim), keys, values


def k1_step(bench: Bench, tokens: int, mass: bool) -> Step:
    q, keys, values = context(bench, tokens)
    pages = full_pages(1, bench.model.kv.kv_heads, tokens, bench.device.at)
    return lambda: k1(q, paged(keys), paged(values), pages, mass)


def library_step(bench: Bench, tokens: int, call: Library) -> Step:
    source = context(bench, tokens)
    return lambda: call(*source)
