"""What a plan of a recall zone is given and what it says (reference: kernels/zone_torch.py, kernel:
kvlens/lab/gpu/kernels/zone_plan.py).

Counted in cells: a cell is a token, or a page where all spans are pages of one size. Of a span the zone holds the
leading cells. Shapes: H KV heads of one layer, S span ids, W wishes, M cells of P tokens, G query heads of a KV head.
Span id 0 is the window's: it is never wished for, so its column of the tables takes what belongs to no wish.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ZoneTables:
    """What the zones of one layer hold, written in place by a plan.

    held int64 [H, S]: cells of each span; stamp int64 [H, S]: larger for spans wished for more recently; span, offset
    int64 [H, M]: what lies in each cell, where `live` bool [H, M].
    """

    held: torch.Tensor
    stamp: torch.Tensor
    span: torch.Tensor
    offset: torch.Tensor
    live: torch.Tensor

    @classmethod
    def empty(cls, heads: int, spans: int, cells: int, device: torch.device | None = None) -> ZoneTables:
        """Zones that hold nothing. Storages of their own: a compiled function may not write to inputs that lie in
        one."""
        held, stamp, span, offset = (
            torch.zeros(heads, size, dtype=torch.long, device=device) for size in (spans, spans, cells, cells)
        )
        return cls(held, stamp, span, offset, torch.zeros_like(span, dtype=torch.bool))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.held, self.stamp, self.span, self.offset, self.live


@dataclass(frozen=True)
class Names:
    """What a layer's zone is called, written in place. position, span int32, role uint8 [H, M P]: of its slots, rows of
    equal stride; is_hot bool [H, S]: spans that lie on the device. roles: codes of a slot that holds a raw span, a
    reconstructed one, nothing."""

    position: torch.Tensor
    span: torch.Tensor
    role: torch.Tensor
    is_hot: torch.Tensor
    roles: tuple[int, int, int]


@dataclass(frozen=True)
class Wishes:
    """Of one layer: requested int64 [H, W], highest priority first, no span twice, below 0: none; read integer [H, G,
    S]: leading tokens that are read, None: all; fire bool [H]: whose wishes are carried out; clock int64 0-d: wishes
    are stamped clock W + 1 to clock W + W, and a plan's stamps have to be larger than those before; rounds: as `fit`;
    reuse: False: what is there is moved again all the same; equal_reuse: every KV head that fires reuses as many cells
    as the one that can reuse fewest."""

    requested: torch.Tensor
    read: torch.Tensor | None
    fire: torch.Tensor
    clock: torch.Tensor
    rounds: int | None
    reuse: bool
    equal_reuse: bool


@dataclass(frozen=True)
class Source:
    """Where spans lie in host memory. lengths float32, starts int32 [S]: of spans, in tokens; packed int64 [H, S]:
    above 0 for those that lie as factors, None: all are rows of the pool; page: tokens of a row; origin: position that
    row 0 begins with; unit_bytes: of a row of one KV head."""

    lengths: torch.Tensor
    starts: torch.Tensor
    packed: torch.Tensor | None
    page: int
    origin: int
    unit_bytes: int


@dataclass(frozen=True)
class Moves:
    """What is to be moved. unit int32 [H, M]: into each cell, as kvlens/lab/gpu/kernels/page_moves.py numbers units,
    -1: nothing; bytes int64 [H]: of these; rebuilt bool [H, M]: cells that factors fill; came bool [H, S]: spans whose
    factors do (None where there are no factors)."""

    unit: torch.Tensor
    bytes: torch.Tensor
    rebuilt: torch.Tensor | None
    came: torch.Tensor | None


@dataclass(frozen=True)
class CellPlan:
    """What is decided, before anything has a name or an address. Cells; of the wishes int64 [H, W]: count: wished for,
    0: no wish; there: that an accepted wish finds in the zone; stay: those of them that are not moved again. accepted
    bool [H, W]. Of the zone: fill bool [H, M]: cells that something has to be moved into (what: the tables' span and
    offset), by the wishes in their order; freed bool [H, M]: cells whose content is given up, filled again or not; gone
    bool [H, S]: spans of which nothing is left."""

    count: torch.Tensor
    accepted: torch.Tensor
    there: torch.Tensor
    stay: torch.Tensor
    fill: torch.Tensor
    freed: torch.Tensor
    gone: torch.Tensor
