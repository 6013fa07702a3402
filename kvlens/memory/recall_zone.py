"""The recall zones of a layer: which spans are there for each KV head, in which slots, and what has to go.

Host bookkeeping only: it decides (kernels/zone_torch.py says how), `Memory` moves. Of a span the zone may hold the
leading tokens only. Shapes: H_kv KV heads, S span ids, W wishes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvlens.kernels.zone_tables import CellPlan, Wishes, ZoneTables
from kvlens.kernels.zone_torch import decide


@dataclass(frozen=True)
class Plan:
    """What one recall of a layer does. Tokens; rows go by KV head, then by priority.

    missing int64 [4, n]: KV head, span, which of its tokens comes first, and how many of them have to come; slots int64
    [sum of these]: where they go; freed bool [H_kv, size]: the zone's slots whose content is given up, taken again or
    not; gone int64 [2, m]: KV head and span of which nothing is left, the least recently wanted first; refused int64
    [2, r]: those that do not fit the zone beside the ones of higher priority.
    """

    missing: np.ndarray
    slots: np.ndarray
    freed: torch.Tensor
    gone: np.ndarray
    refused: np.ndarray
    counts: dict[str, np.ndarray]
    """int64 [H_kv]: n_recalled, n_reused (spans), recalled_tokens, reused_tokens, ideal_tokens: what had to come if
    all that is there were reused"""


class RecallZone:
    """Slots [first, first + size) of every KV head of one layer. Spans stay until their slots are needed, the least
    recently used go first. page: all spans are pages of so many tokens; 1: they have any length."""

    def __init__(self, kv_heads: int, spans: int, first: int, size: int, page: int = 1) -> None:
        self.first, self.size, self.page = first, size // page * page, page
        self.tables = ZoneTables.empty(kv_heads, spans, size // page)
        self._stamped = 0
        """no span has a larger stamp"""

    def plan(
        self,
        requested: torch.Tensor,
        lengths: torch.Tensor,
        fire: torch.Tensor,
        read: torch.Tensor | None = None,
        *,
        fits: bool = False,
        reuse: bool = True,
        equal_reuse: bool = False,
    ) -> Plan:
        """Fit the wishes of the KV heads that `fire` into their zones, write that down and return it: as
        kvlens.kernels.zone_tables.Wishes has them, on the CPU, with at least one column. lengths [S]: tokens of spans.
        fits: they never exceed the zone."""
        wishes = requested.shape[1]
        clock = -(-self._stamped // wishes)
        self._stamped = (clock + 1) * wishes
        rounds = 1 if fits else None
        planned = Wishes(requested, read, fire, torch.tensor(clock), rounds, reuse, equal_reuse)
        return self._plan(decide(self.tables, planned, lengths, self.page), requested)

    def _plan(self, plan: CellPlan, requested: torch.Tensor) -> Plan:
        page, requested_spans = self.page, requested.numpy()
        count, accepted, present, stay = (x.numpy() for x in (plan.count, plan.accepted, plan.there, plan.stay))
        missing = np.where(accepted, count - stay, 0)
        short, over = missing.nonzero(), ((count > 0) & ~accepted).nonzero()
        slots = self.first + plan.fill.numpy().nonzero()[1][:, None] * page + np.arange(page)
        heads, spans = plan.gone.numpy().nonzero()
        order = np.lexsort((self.tables.stamp.numpy()[heads, spans], heads))
        counts = {
            "n_recalled": (missing > 0).sum(1),
            "n_reused": (accepted & (missing == 0)).sum(1),
            "recalled_tokens": missing.sum(1) * page,
            "reused_tokens": stay.sum(1) * page,
            "ideal_tokens": np.where(accepted, count - present, 0).sum(1) * page,
        }
        return Plan(
            np.stack((short[0], requested_spans[short], stay[short] * page, missing[short] * page)),
            slots.ravel(),
            plan.freed.repeat_interleave(page, 1) if page > 1 else plan.freed,
            np.stack((heads[order], spans[order])),
            np.stack((over[0], requested_spans[over])),
            counts,
        )


@dataclass(frozen=True)
class TokenPlan:
    """What one recall does for some KV heads of a layer. All int64.

    heads, positions, slots [n]: tokens that are to come, KV head after KV head, by ascending position; freed [2, m]: KV
    head and slot of what gives way; before, after [2, .]: KV head and position of what the zones held and hold.
    """

    heads: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    freed: np.ndarray
    before: np.ndarray
    after: np.ndarray


class TokenZone:
    """Slots [first, first + size) of every KV head of a layer."""

    def __init__(self, first: int, size: int, kv_heads: int) -> None:
        self.first = first
        self.position = np.full((kv_heads, size), -1, np.int64)
        """[H_kv, size]: what lies where, -1: nothing"""

    def plan(self, requested: np.ndarray, heads: np.ndarray) -> TokenPlan:
        """Bring the zones of `heads` int64 [n] to hold requested int64 [H_kv, W], -1: nothing. Applies the plan to this
        bookkeeping and returns it. Raises AssertionError where there is too little room."""
        missed, freed = [], []
        held_before = self._held(heads)
        for head in heads:
            here = self.position[head]
            requested_tokens = np.unique(requested[head][requested[head] >= 0])
            assert len(requested_tokens) <= len(here), (
                f"{len(requested_tokens)} tokens are requested, there is room for {len(here)}"
            )
            evicted = np.flatnonzero((here >= 0) & ~np.isin(here, requested_tokens))
            new = np.setdiff1d(requested_tokens, here, assume_unique=True)
            here[evicted] = -1
            free = np.flatnonzero(here < 0)[: len(new)]
            here[free] = new
            missed.append(np.stack((np.full(len(new), head), new, self.first + free)))
            freed.append(np.stack((np.full(len(evicted), head), self.first + evicted)))
        owner, positions, slots = np.concatenate(missed, 1)
        return TokenPlan(owner, positions, slots, np.concatenate(freed, 1), held_before, self._held(heads))

    def contents(self) -> np.ndarray:
        """Return KV head and position of all tokens of the zones, int64 [2, n]."""
        return self._held(np.arange(len(self.position)))

    def _held(self, heads: np.ndarray) -> np.ndarray:
        row, slot = np.nonzero(self.position[heads] >= 0)
        return np.stack((heads[row], self.position[heads[row], slot]))
