"""What kernels are checked and timed on: a recall zone with wishes to it, spans that factors bring into one, and slots
with who reads what of them, pages that k1 attends. What is drawn on the CPU, `copy_to` brings to a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvlens.kernels.page_attend import Pages
from kvlens.kernels.slot_tables import SlotReads
from kvlens.kernels.zone_tables import Names, Source, Wishes, ZoneTables
from kvlens.kernels.zone_torch import rounds_for
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.part import Bench
from kvlens.memory.reads import CODES

ROLES = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Zone:
    """wishes and cells of a KV head; spans that there are; tokens of a row; tokens of the longest span, the shortest
    has half as many; factors: half of the spans lie as factors; parts: a part of a span is read, and KV heads reuse
    alike."""

    name: str
    wishes: int
    cells: int
    spans: int
    page: int
    longest: int
    factors: bool = False
    parts: bool = False


ZONES = (
    Zone("pages", 32, 32, 4096, 32, 32),
    Zone("factors", 102, 3264, 2048, 1, 64, factors=True),
    Zone("factors, many expanded", 211, 13_504, 2048, 1, 64, factors=True),
    Zone("parts of spans", 205, 3277, 2048, 1, 16, parts=True),
    Zone("parts of many spans", 819, 13_107, 8192, 1, 16, parts=True),
)
SMALL_ZONES = (
    Zone("pages", 5, 5, 20, 32, 32),
    Zone("factors", 6, 40, 30, 1, 12, factors=True),
    Zone("parts", 6, 40, 30, 1, 12, parts=True),
)


def empty_zone(
    heads: int, spans: int, cells: int, page: int, device: torch.device | None = None
) -> tuple[ZoneTables, Names]:
    """A zone that holds nothing."""
    held, stamp = torch.zeros(2, heads, spans, dtype=torch.long, device=device)
    span, offset = torch.zeros(2, heads, cells, dtype=torch.long, device=device)
    live, is_hot = (torch.zeros(heads, size, dtype=torch.bool, device=device) for size in (cells, spans))
    position, name = torch.zeros(2, heads, cells * page, dtype=torch.int32, device=device)
    role = torch.full(position.shape, ROLES[-1], dtype=torch.uint8, device=device)
    return ZoneTables(held, stamp, span, offset, live), Names(position, name, role, is_hot, ROLES)


def zone_tables(zone: Zone, heads: int) -> tuple[ZoneTables, Names, Source]:
    """An empty zone, on the CPU, and spans that lie in host memory."""
    shortest = zone.longest if zone.page > 1 else zone.longest // 2
    lengths = torch.randint(shortest, zone.longest + 1, (zone.spans,))
    packed = torch.where(torch.rand(heads, zone.spans) < 0.5, lengths, 0) if zone.factors else None
    if packed is not None:
        packed[:, 0] = 0  # the window's id
    source = Source(lengths.float(), (lengths.cumsum(0) - lengths).int(), packed, zone.page, 0, 512 * zone.page)
    return *empty_zone(heads, zone.spans, zone.cells, zone.page), source


def zone_wishes(zone: Zone, heads: int, group: int, step: int, fires: float = 1.0) -> Wishes:
    """Of step `step`, on the CPU: a third of them is new at every step. They do not always fit."""
    order = torch.Generator().manual_seed(0)
    ids = torch.stack([1 + torch.randperm(zone.spans - 1, generator=order) for _ in range(heads)])
    requested = ids[:, (torch.arange(zone.wishes) + step * max(1, zone.wishes // 3)) % (zone.spans - 1)].contiguous()
    read = torch.randint(0, zone.longest + 1, (heads, group, zone.spans)) if zone.parts else None
    shortest = 1 if zone.parts else max(1, zone.longest // 2)
    rounds = 1 if zone.page > 1 else rounds_for(shortest, zone.longest)
    return Wishes(requested, read, torch.rand(heads) < fires, torch.tensor(step), rounds, True, zone.parts)


def copy_to(value: Any, device: torch.device) -> Any:
    """The same on a device: a dataclass of tensors and of what is none. Tables are copied, so that two plans do not
    share them."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return type(value)(
        **{name: x.clone().to(device) if isinstance(x, torch.Tensor) else x for name, x in fields.items()}
    )


@dataclasses.dataclass(frozen=True)
class Arrived:
    """As kernels/arrivals.py takes them: came bool [H, S]; meta int64 [H, S, 4]; new keys and values [2, H, A, T, D];
    span, offset int64, fill bool [H, M]; keys and values of the cells [2, H, M, D]."""

    came: torch.Tensor
    meta: torch.Tensor
    new: torch.Tensor
    span: torch.Tensor
    offset: torch.Tensor
    fill: torch.Tensor
    cells: torch.Tensor


def arrived(
    heads: int, spans: int, places: int, longest: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> Arrived:
    """On the CPU. Spans of half of `longest` tokens to all of them; some come for every KV head but for one, one has as
    many as there are places; their tokens lie anywhere among cells that stay."""
    came, meta = torch.zeros(heads, spans, dtype=torch.bool), torch.zeros(heads, spans, 4, dtype=torch.long)
    meta[..., 0] = torch.arange(heads * spans).view(heads, spans) * 1000
    meta[..., 1] = torch.randint(longest // 2, longest + 1, (heads, spans))
    meta[..., 2:] = torch.randint(1, 17, (heads, spans, 2))
    size = places * longest
    span, offset = torch.zeros(2, heads, size, dtype=torch.long)
    fill = torch.zeros(heads, size, dtype=torch.bool)
    for head in range(heads - 1):
        ids = torch.randperm(spans)[: places if head == 0 else places // 3]
        came[head, ids] = True
        lengths = meta[head, ids, 1]
        shuffled = torch.randperm(size)[: int(lengths.sum())]
        fill[head, shuffled] = True
        span[head, shuffled] = ids.repeat_interleave(lengths)
        offset[head, shuffled] = torch.cat([torch.arange(n) for n in lengths.tolist()])
    # token-major, as slots are
    cells = torch.randn(2, size, heads, dim).to(dtype).transpose(1, 2)
    return Arrived(came, meta, torch.randn(2, heads, places, longest, dim).to(dtype), span, offset, fill, cells)


def slots_read(heads: int, group: int, slots: int, spans: int, parts: bool) -> SlotReads:
    """On the CPU. All roles; a stretch of free slots, and a KV head that has none but free ones; parts: spans are read
    in part."""
    role = torch.randint(0, max(CODES) + 1, (heads, slots), dtype=torch.uint8)
    role[:, slots // 3 : slots // 2] = CODES.free
    role[0] = CODES.free
    span, position = (torch.randint(0, size, (heads, slots), dtype=torch.int32) for size in (spans, 32))
    selectable, is_hot, fine = (torch.rand(size) < 0.7 for size in ((spans,), (heads, spans), (heads, group, spans)))
    logs = torch.randint(1, 99, (spans,)).float().log()
    tokens = torch.randint(0, 32, (heads, group, spans)) if parts else None
    return SlotReads(
        role,
        span,
        position,
        logs,
        torch.zeros(spans, dtype=torch.int32),
        selectable,
        is_hot,
        group,
        CODES,
        fine,
        tokens,
    )


def ragged_pages(
    bench: Bench,
    sizes: tuple[int, int, int],
    batch: int,
    places: int,
    biased: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Pages]:
    """sizes: (H_kv, G, D). On the device q, keys, values, pages: ragged, some entries hidden from some query heads, one
    table shorter than the others."""
    (heads, group, dim), device = sizes, bench.device.at
    slots = batch * places
    keys, values = (bench.device.normal(slots, PAGE, heads, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    table = torch.stack([torch.randperm(slots)[:places] for _ in range(batch * heads)]).view(batch, heads, places).int()
    lengths = torch.randint(1, PAGE + 1, (batch, heads, places), dtype=torch.int32)
    count = torch.full((batch, heads), places, dtype=torch.int32)
    count[0, 0] = max(1, places // 2)
    bias = row = None
    if biased:
        bias = torch.randn(slots, group, PAGE)
        bias[:, 1, ::5] = -torch.inf
        bias, row = bias.to(device), torch.where(torch.rand(table.shape) < 0.5, table, -1).int().to(device)
    pages = Pages(table.to(device), lengths.to(device), count.to(device), bias, row)
    return bench.device.normal(batch, heads * group, dim, dtype=dtype), keys, values, pages
