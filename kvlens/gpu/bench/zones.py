"""A drawn recall zone and wishes to it, for the zone plan's check and times."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvlens.kernels.zone_torch import Names, Source, Wishes, ZoneTables, rounds_for

ROLES = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Shape:
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


SHAPES = (
    Shape("FreeKV", 32, 32, 4096, 32, 32),
    Shape("SeKV, factors", 102, 3264, 2048, 1, 64, factors=True),
    Shape("SeKV, factors, zooms as recorded at 128K", 211, 13_504, 2048, 1, 64, factors=True),
    Shape("SentKVCompress at 32K", 205, 3277, 2048, 1, 16, parts=True),
    Shape("SentKVCompress at 128K", 819, 13_107, 8192, 1, 16, parts=True),
)
SMALL = (
    Shape("pages", 5, 5, 20, 32, 32),
    Shape("factors", 6, 40, 30, 1, 12, factors=True),
    Shape("parts", 6, 40, 30, 1, 12, parts=True),
)


def empty(heads: int, spans: int, cells: int, page: int, at: torch.device | None = None) -> tuple[ZoneTables, Names]:
    """A zone that holds nothing."""
    held, stamp = torch.zeros(2, heads, spans, dtype=torch.long, device=at)
    span, offset = torch.zeros(2, heads, cells, dtype=torch.long, device=at)
    live, is_hot = (torch.zeros(heads, size, dtype=torch.bool, device=at) for size in (cells, spans))
    position, name = torch.zeros(2, heads, cells * page, dtype=torch.int32, device=at)
    role = torch.full(position.shape, ROLES[-1], dtype=torch.uint8, device=at)
    return ZoneTables(held, stamp, span, offset, live), Names(position, name, role, is_hot, ROLES)


def drawn(shape: Shape, heads: int) -> tuple[ZoneTables, Names, Source]:
    """An empty zone, on the CPU, and spans that lie in host memory."""
    shortest = shape.longest if shape.page > 1 else shape.longest // 2
    lengths = torch.randint(shortest, shape.longest + 1, (shape.spans,))
    packed = torch.where(torch.rand(heads, shape.spans) < 0.5, lengths, 0) if shape.factors else None
    if packed is not None:
        packed[:, 0] = 0  # the window's id
    source = Source(lengths.float(), (lengths.cumsum(0) - lengths).int(), packed, shape.page, 0, 512 * shape.page)
    return *empty(heads, shape.spans, shape.cells, shape.page), source


def wishes(shape: Shape, heads: int, group: int, step: int, fires: float = 1.0) -> Wishes:
    """Of step `step`, on the CPU: a third of them is new at every step. They do not always fit."""
    order = torch.Generator().manual_seed(0)
    ids = torch.stack([1 + torch.randperm(shape.spans - 1, generator=order) for _ in range(heads)])
    want = ids[:, (torch.arange(shape.wishes) + step * max(1, shape.wishes // 3)) % (shape.spans - 1)].contiguous()
    read = torch.randint(0, shape.longest + 1, (heads, group, shape.spans)) if shape.parts else None
    shortest = 1 if shape.parts else max(1, shape.longest // 2)
    rounds = 1 if shape.page > 1 else rounds_for(shortest, shape.longest)
    return Wishes(want, read, torch.rand(heads) < fires, torch.tensor(step), rounds, True, shape.parts)


def there(value: Any, device: torch.device) -> Any:
    """The same on a device: a dataclass of tensors and of what is none. Tables are copied, so that two plans do not
    share them."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return type(value)(
        **{name: x.clone().to(device) if isinstance(x, torch.Tensor) else x for name, x in fields.items()}
    )
