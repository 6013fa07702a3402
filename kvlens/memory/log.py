"""The log of what happens in the memory beside transfers: events, ranks and cuts, and how spans are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from kvlens.instruments import CutRow, NoClock
from kvlens.memory.placement import Kept, Placement
from kvlens.rows import EventRow, SpanHeadRow
from kvlens.shape import KVShape
from kvlens.tiers.slots import WINDOW, SpanTable

ARRIVAL = {"zoom": "zoom_in", "prefetch": "prefetch", "correction": "correction"}
"""Event that logs a span's arrival, by the cause of its transfer; 'recall' for the others."""
DEPARTURE = {"zoom": "zoom_out"}
"""Event that logs that the device gave a span up; 'release' for the others."""

_Column = np.ndarray | Sequence[Any]
_Batch = tuple[int, bool, int | None, Sequence[str], _Column, _Column, _Column]
"""step, whether the layer had attended in it, layer; kinds, KV heads, spans, values (NaN in an array: none)"""


class MemoryLog:
    """What happened in the memory, in order, until the recorder takes it. What a layer's KV heads do at once is one
    entry; rows are made when the recorder takes them. `step`: of what is logged from now on; `attended`: the layer that
    attended last in it, later layers are still to come."""

    def __init__(self) -> None:
        self.step = self.attended = -1
        self.clock = NoClock()
        """times the phases of recalls"""
        self._events: list[_Batch] = []
        self._cuts: list[Callable[[], list[CutRow]]] = []
        self._stored: list[Callable[[], list[SpanHeadRow]]] = []

    def event(
        self,
        kind: str,
        layer: int | None = None,
        kv_head: int | None = None,
        span: int | None = None,
        value: float | None = None,
    ) -> None:
        """Log one event."""
        self._events.append((self.step, self._has_attended(layer), layer, (kind,), (kv_head,), (span,), (value,)))

    def events_of(
        self,
        kinds: str | Sequence[str],
        layer: int | None,
        kv_heads: np.ndarray,
        spans: np.ndarray,
        values: np.ndarray | None = None,
    ) -> None:
        """Log an event for each unit (KV head, span) [n] of a layer (None: of all), in this order. kinds: one for all,
        or one of each; values: NaN: none. The arrays are kept, so they must not be written again."""
        if not len(spans):
            return
        named = (kinds,) * len(spans) if isinstance(kinds, str) else kinds
        recorded = (None,) * len(spans) if values is None else values
        self._events.append((self.step, self._has_attended(layer), layer, named, kv_heads, spans, recorded))

    def _has_attended(self, layer: int | None) -> bool:
        return layer is not None and layer <= self.attended

    def cuts(self, rows: Callable[[], list[CutRow]]) -> None:
        """Log ranks, scores and cuts of tokens that were not kept. rows: makes the rows when they are taken; nothing
        that it reads may change by then."""
        self._cuts.append(rows)

    def log_stored(self, rows: Callable[[], list[SpanHeadRow]]) -> None:
        """Log how spans are stored in the cold tier, or packed. rows: makes the rows when they are taken."""
        self._stored.append(rows)

    def __iter__(self) -> Iterator[EventRow]:
        for step, after_event, layer, kinds, kv_heads, spans, values in self._events:
            for kind, kv_head, span, value in zip(kinds, *map(_listed, (kv_heads, spans, values)), strict=True):
                yield EventRow(step, layer, kv_head, None, kind, span, value, after_event)

    def take_events(self) -> list[EventRow]:
        """Return the events since the last call."""
        rows = list(self)
        self._events.clear()
        return rows

    def take_cuts(self) -> list[CutRow]:
        """Return the cuts since the last call."""
        makers, self._cuts = self._cuts, []
        return [row for make in makers for row in make()]

    def forget_cuts(self) -> None:
        """Let go of the cuts since the last call, and of the scores that they are made from: nobody takes them."""
        self._cuts = []

    def take_stored(self) -> list[SpanHeadRow]:
        """Return how the spans are stored that were stored or packed since the last call."""
        makers, self._stored = self._stored, []
        return [row for make in makers for row in make()]

    def discard(self) -> None:
        """Discard what nobody has taken: nothing is recorded."""
        self._events, self._cuts, self._stored = [], [], []


def _listed(column: _Column) -> Sequence[Any]:
    """Return a column of a batch as a row takes it, with None for NaN."""
    if not isinstance(column, np.ndarray):
        return column
    return [None if number != number else number for number in column.tolist()]


def no_recalls(shape: KVShape) -> dict[str, np.ndarray]:
    """Return the counts of a step without recalls, [L, H_kv] each: n_recalled, n_reused (spans), recalled_tokens,
    reused_tokens, and ideal_bytes (NaN: no recall truncated its reuse)."""
    size = (shape.layers, shape.kv_heads)
    counts = {name: np.zeros(size) for name in ("n_recalled", "n_reused", "recalled_tokens", "reused_tokens")}
    return counts | {"ideal_bytes": np.full(size, np.nan)}


def owners(placement: Placement, ids: list[int], selected: Iterable[int], end: int) -> torch.Tensor:
    """Return int64 [end]: the id of the chosen span that each position is in, -1 where none is."""
    owner = torch.full((end,), -1, dtype=torch.long)
    for number in selected:
        owner[placement.spans[number].tok_start : placement.spans[number].tok_end] = ids[number]
    return owner


def cuts(retained: Kept, owner: torch.Tensor, step: int) -> list[CutRow]:
    """What was dropped of each span, and where the best of it stood in the ranking: one row per (layer, KV head), with
    None for a dimension in which all are alike. owner int64 [n]: span id of each position, -1 where the position lies
    in the window. Empty where the method ranks nothing.
    """
    if retained.score is None and not retained.newest:
        return []
    n = len(owner)
    score = torch.arange(n)[None, None] if retained.score is None else retained.score[..., :n]
    size = torch.broadcast_shapes(score.shape[:2], retained.positions.shape[:2])
    mask = retained.mask(n).expand(*size, n).cpu().numpy()
    scores, owners = score.float().expand(*size, n).cpu().numpy(), owner.cpu().numpy()
    rows = []
    for layer in range(size[0]):
        for head in range(size[1]):
            where = (layer if size[0] > 1 else None, head if size[1] > 1 else None)
            row = _cut(step, *where, scores[layer, head], mask[layer, head], owners)
            if row is not None and retained.score is None:  # the scores were positions
                row = replace(row, cut=float("nan"), score=np.full_like(row.score, np.nan))
            rows += [] if row is None else [row]
    return rows


def _cut(
    step: int, layer: int | None, kv_head: int | None, score: np.ndarray, retained: np.ndarray, owner: np.ndarray
) -> CutRow | None:
    """Of one KV head, score float32, retained bool and owner int64 [n]. None: it lost nothing that was ranked."""
    ranked = ~np.isnan(score)
    dropped = np.flatnonzero(ranked & ~retained & (owner >= 0))
    if not len(dropped):
        return None
    order = np.argsort(-score[ranked], kind="stable")
    rank = np.zeros(len(score), np.int64)
    rank[np.flatnonzero(ranked)[order]] = np.arange(1, len(order) + 1)
    best_first = dropped[np.argsort(rank[dropped])]
    spans, best_places, counts = np.unique(owner[best_first], return_index=True, return_counts=True)
    positions = best_first[best_places]
    stayed = score[ranked & retained]
    cut = float(stayed.min()) if len(stayed) else float("nan")
    return CutRow(
        step=step,
        layer=layer,
        kv_head=kv_head,
        candidates=int(ranked.sum()),
        kept=len(stayed),
        cut=cut,
        span=spans.astype(np.int32),
        dropped=counts.astype(np.int32),
        pos=positions.astype(np.int32),
        rank=rank[positions].astype(np.int32),
        score=score[positions].astype(np.float32),
    )


class Zone(Protocol):
    """A recall zone that can hold parts of spans (kvlens/memory/zones.py)."""

    def tokens(self, spans: SpanTable) -> np.ndarray:
        """Return the tokens of each span in the zone, int64 [H_kv, S]."""


class RecalledParts:
    """Logs how many tokens the device has of spans that were recalled in part: the event `part`, where that changed.
    Layers that recall whole spans have none."""

    def __init__(self, spans: SpanTable, kv_heads: int, log: MemoryLog) -> None:
        self._spans, self._kv_heads, self._log = spans, kv_heads, log
        self.zones: dict[int, Zone] = {}
        """of the layers that recall parts of spans; of other layers nothing is logged"""
        self._logged: dict[int, np.ndarray] = {}
        """of the layers that recall parts of spans, int64 [H_kv, S]: tokens that were logged; 0 of other spans"""

    def watch(self, layer: int, zone: Zone) -> None:
        """Follow the zone of a layer that recalls tokens or parts of spans."""
        self.zones[layer] = zone
        if layer not in self._logged:
            self._logged[layer] = np.zeros((self._kv_heads, self._spans.capacity), np.int64)

    def forget(self, layer: int, kv_heads: np.ndarray, spans: np.ndarray) -> None:
        """Expect nothing of units [n] whose arrival was logged: that event stands for all of a span."""
        self._logged[layer][kv_heads, spans] = 0

    def log(self, layer: int) -> None:
        """Log what the zone of a layer has in part."""
        tokens = self.zones[layer].tokens(self._spans)
        in_part = np.where(tokens < self._spans.host_lengths, tokens, 0)
        in_part[:, WINDOW] = 0
        heads, spans = np.nonzero((in_part > 0) & (in_part != self._logged[layer]))
        self._log.events_of("part", layer, heads, spans, in_part[heads, spans].astype(np.float64))
        self._logged[layer] = in_part
