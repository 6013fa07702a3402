"""What a method asks of the memory: where tokens go when prefill ends or a block leaves the window, and what a step
attends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from kvlens.link.codec import Codec
from kvlens.spans import Span
from kvlens.tiers.slots import FREE, ROLE


@dataclass(frozen=True)
class Kept:
    """Positions that stay, ragged over layers and KV heads. A dimension of size 1 speaks for all layers or KV heads."""

    positions: torch.Tensor
    """int64 [L|1, H_kv|1, m], ascending, -1 behind the last one where a KV head keeps fewer"""
    score: torch.Tensor | None = None
    """float32 [L|1, H_kv|1, n] of the positions from 0 on: by which they were ranked, the highest kept; NaN: not
    ranked, kept for a reason of its own or gone without a comparison. None: the method ranks nothing"""
    newest: bool = False
    """what is not kept went since it is old: logged as ranked by position, without scores"""

    @classmethod
    def everywhere(cls, positions: torch.Tensor, score: torch.Tensor | None = None) -> Kept:
        """The same positions [m] for every layer and KV head."""
        return cls(positions[None, None], score)

    @classmethod
    def ragged(
        cls, positions: Sequence[Sequence[torch.Tensor]], score: torch.Tensor | None = None, newest: bool = False
    ) -> Kept:
        """positions[layer][KV head]: int64 [m of it], ascending; a layer with one entry speaks for all its KV heads."""
        most = max((len(head) for layer in positions for head in layer), default=0)
        device = positions[0][0].device
        table = torch.full((len(positions), len(positions[0]), most), -1, dtype=torch.long, device=device)
        for number, layer in enumerate(positions):
            for head, positions_kept in enumerate(layer):
                table[number, head, : len(positions_kept)] = positions_kept
        return cls(table, score, newest)

    @classmethod
    def masked(cls, mask: torch.Tensor, score: torch.Tensor | None = None) -> Kept:
        """The positions where mask bool [L|1, H_kv|1, n] is true."""
        n = mask.shape[-1]
        order = torch.where(mask, torch.arange(n, device=mask.device), n).sort(-1).values
        order = order[..., : int(mask.sum(-1).max())] if mask.numel() else order
        return cls(torch.where(order < n, order, -1), score)

    def select(self, layers: slice, heads: slice) -> torch.Tensor:
        """The positions of some layers and KV heads, int64 [l|1, h|1, m], without columns that none of them fills."""
        positions = self.positions
        if positions.shape[0] > 1:
            positions = positions[layers]
        if positions.shape[1] > 1:
            positions = positions[:, heads]
        most = int((positions >= 0).sum(-1).max()) if positions.numel() else 0
        return positions[..., :most]

    def mask(self, n: int) -> torch.Tensor:
        """bool [L|1, H_kv|1, n]: kept."""
        size = (*self.positions.shape[:2], n + 1)
        mask = torch.zeros(size, dtype=torch.bool, device=self.positions.device)
        return mask.scatter_(2, torch.where(self.positions < 0, n, self.positions), True)[..., :n]


@dataclass
class Placement:
    """Where the tokens of a position range go. Every position of the range is in exactly one span or, at the end of
    prefill, in the window. The spans get their ids from the memory, in this order; the lists below index into them. In
    the layers and KV heads that are dense by the layout every token is kept, whatever is said here.
    """

    spans: list[Span]
    states: list[str]
    """state of each span, one of kvlens.rows.SPAN_STATES"""
    roles: list[str]
    """role of each span's full-resolution tokens on the device, one of kvlens.rows.ROLES"""
    kept: Kept
    """positions that stay on the device at full resolution"""
    coarse: list[int] = field(default_factory=list)
    """spans that get a coarse entry"""
    coarse_keys: torch.Tensor | None = None
    """[L, H_kv, len(coarse), D], or as many entries as `coarse_spans` has"""
    coarse_values: torch.Tensor | None = None
    offload: list[int] = field(default_factory=list)
    """spans whose tokens go to the cold tier through `codec`"""
    codec: Codec | None = None
    cold: Kept | None = None
    """of the offloaded spans, the positions that go to the cold tier per layer and KV head, and what they were ranked
    by: the others are gone for good. For spans that lie as they are and are recalled by position. None: all"""
    selectable: list[int] = field(default_factory=list)
    """kept spans that a query head attends only where its selection says so, like the offloaded ones"""
    coarse_counts: torch.Tensor | None = None
    """[L, H_kv, len(coarse)]: tokens that each entry stands for, which need not be whole; their log is added to its
    score; 0: this KV head does not have it. For a layout that is `weighted`. None: the tokens of its span"""
    coarse_spans: torch.Tensor | None = None
    """int64 [L, H_kv, entries], where KV heads have other entries, or several of one span: to which of `spans` each
    belongs. For a layout that is `weighted`. None: one entry for each of `coarse`"""

    def name_tokens(self, positions: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return span ids and role codes of positions, by the spans' ranges; FREE where there is no position. ids: of
        the spans."""
        device = positions.device
        starts = torch.tensor([span.tok_start for span in self.spans], device=device)
        row = (torch.searchsorted(starts, positions.contiguous(), right=True) - 1).clamp(min=0)
        codes = torch.tensor([ROLE[role] for role in self.roles], device=device)
        nothing = positions < 0
        return torch.tensor(ids, device=device)[row].masked_fill(nothing, 0), codes[row].masked_fill(nothing, FREE)


@dataclass
class Eviction:
    """One token out of the bag of every (layer, KV head), in the place of which the next step's token comes."""

    places: torch.Tensor
    """int64 [L, H_kv]: places in the bag, counted from the window's first slot; -1, for all KV heads of equal zones:
    nothing goes, there is room"""
    candidates: int
    """tokens that could have been evicted"""
    score: torch.Tensor | None = None
    """[L, H_kv]: what the evicted were ranked by, the lowest of all; None: by position"""
    cut: torch.Tensor | None = None
    """[L, H_kv]: the lowest score that stayed"""


@dataclass
class Blend:
    """What a layer's attention output becomes: share * output + (1 - share) * value, so that a mean value stands in for
    the tokens that are not attended."""

    share: torch.Tensor
    """float32 [H_kv, G], from 0 to 1"""
    value: torch.Tensor
    """float32 [H_kv, D]"""
    weights: torch.Tensor
    """float32 [H_kv, G, P]: estimated weight of every position; `share` is their sum over the attended ones"""

    def mixed(self, out: torch.Tensor) -> torch.Tensor:
        """out [1, Hq, 1, D] -> the same shape and dtype."""
        exact = out.float().view(*self.share.shape, -1)
        return (self.share[..., None] * exact + (1 - self.share)[..., None] * self.value[:, None]).view_as(out).to(out)


class Correction(Protocol):
    """Weighs tokens that were sampled, so that those that were not are accounted for."""

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return what is added to the scores, float32 [h, G, C], finite: keys [h, C, D] of the slots of the KV heads
        `heads`, positions int32 [h, C], -1 where a slot holds no token."""


@dataclass(frozen=True)
class Gate:
    """What a method compared to decide, for the log: per query head [Hq] of a zoom, else per KV head [H_kv]."""

    score: torch.Tensor
    cut: torch.Tensor | float
    """of the same shape, or one for all"""


@dataclass
class Selection:
    """What the query heads of one layer attend beyond kept tokens and window. Tables of fixed width: S span ids, W
    wishes. The tensors are read after the step as well: hand out fresh ones, or ones that are never written again.
    """

    fine: torch.Tensor
    """[H_kv, G, S] bool: this query head reads the span token by token if it is hot, through its coarse entry (if any)
    otherwise"""
    requested: torch.Tensor
    """[H_kv, W] int64: spans to be brought to the device, highest priority first, -1 = none"""
    rows: torch.Tensor | None = None
    """[H_kv, W] int64: positions of single tokens of offloaded spans that each KV head is to have on the device, and no
    others: what was recalled before and is not here gives way. -1 = none; `requested` names no spans then, and `fine`
    those in which the rows lie. None: recalled by span"""
    tokens: torch.Tensor | None = None
    """[H_kv, G, S] integer: how many leading tokens of the span are read; None: all of them"""
    positions: torch.Tensor | None = None
    """[H_kv, G, P] bool: positions whose tokens are read at all, whatever span or window they lie in; None: as the
    spans say"""
    blend: Blend | None = None
    """None: the output is the attention's own"""
    entries: torch.Tensor | None = None
    """[H_kv, G|1, E] bool: which of the layer's coarse entries, in the order in which they were placed, are read,
    whatever `fine` says; for spans that have several. None: as `fine` says"""
    members: torch.Tensor | None = None
    """[H_kv, P] int64, with `entries`: the coarse entry that stands for the token at each position, -1: none does"""
    correct: Correction | None = None
    """what is added to the scores of tokens that were sampled; None: scores are the products alone"""
    now: torch.Tensor | None = None
    """[H_kv] bool: which KV heads' wishes are moved before this step's attention, which waits for them; the others' are
    moved after it, to be used from the next step on. None: all now"""
    cause: str = "recall"
    """of what is moved now, one of kvlens.rows.CAUSES"""
    later_cause: str = "prefetch"
    equal_reuse: bool = False
    """every KV head reuses as many tokens as the one that can reuse fewest; the rest is loaded again (sentence-level
    compression, sec. 4.2.2)"""
    fits: bool = False
    """the wishes of a KV head never exceed its recall zone: the method has sized them so, nothing can be refused"""
    reuse: bool = True
    """False: what is wanted is moved whether or not it is on the device (the worst case, as without a cache of recalled
    pages)"""
    zoomable: torch.Tensor | None = None
    """[S] or [H_kv, S] bool: spans that could be expanded, the denominator of the zoom rate; None: this method does not
    zoom"""
    score: torch.Tensor | None = None
    """[H_kv, S]: by which spans were ranked, for the log; NaN where a span was no candidate"""
    gate: Gate | None = None
    """by what it was decided, for the log; None: by `score`"""
    index_bytes: int = 0
    """bytes of the method's own index that were read for the choice of one KV head"""
    head_columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """columns of kvlens.rows.HEAD_COLUMNS that the method itself knows, [Hq]"""
    kv_columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """columns of kvlens.rows.KV_COLUMNS, [H_kv]"""

    @property
    def summarised(self) -> torch.Tensor | None:
        """[H_kv, G|1, P] bool: positions of the tokens that the read entries stand for. None: `entries` has no
        members."""
        if self.entries is None or self.members is None:
            return None
        index = self.members.clamp(min=0)[:, None].expand(-1, self.entries.shape[1], -1)
        return self.entries.gather(-1, index) & (self.members >= 0)[:, None]

    def take_heads(self, heads: slice) -> Selection:
        """What some of the KV heads attend."""
        names = ("tokens", "positions", "entries", "members")
        tables = {name: table[heads] for name in names if (table := getattr(self, name)) is not None}
        return replace(self, fine=self.fine[heads], requested=self.requested[heads], **tables)


def index_read(count: Callable[[], int]) -> int:
    """What a selection read of its index, for the log. 0 in a step that is compiled: it logs no bytes, and a number
    that grows as the index does would be another graph for every step."""
    return 0 if torch.compiler.is_compiling() else count()
