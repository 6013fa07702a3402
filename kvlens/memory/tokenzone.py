"""A recall zone as single tokens: which position lies in which slot of each KV head of a layer.

A KV head's zone holds what was requested last and nothing else, so that all of it may be attended: what is requested
again stays where it is, everything else gives its slot up. Host bookkeeping only: it decides, `Memory` moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
        before = self._held(heads)
        for head in heads:
            here = self.position[head]
            asked = np.unique(requested[head][requested[head] >= 0])
            assert len(asked) <= len(here), f"{len(asked)} tokens are requested, there is room for {len(here)}"
            gone = np.flatnonzero((here >= 0) & ~np.isin(here, asked))
            new = np.setdiff1d(asked, here, assume_unique=True)
            here[gone] = -1
            at = np.flatnonzero(here < 0)[: len(new)]
            here[at] = new
            missed.append(np.stack((np.full(len(new), head), new, self.first + at)))
            freed.append(np.stack((np.full(len(gone), head), self.first + gone)))
        owner, positions, slots = np.concatenate(missed, 1)
        return TokenPlan(owner, positions, slots, np.concatenate(freed, 1), before, self._held(heads))

    def _held(self, heads: np.ndarray) -> np.ndarray:
        row, slot = np.nonzero(self.position[heads] >= 0)
        return np.stack((heads[row], self.position[heads[row], slot]))
