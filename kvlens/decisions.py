"""What a run decided at one step and before it: the rows of the table `decision`, part of the contract of
``rows.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from kvlens.instruments import CutRow

#: zoom: a query head asks for a span's tokens in place of the summary; recall: a KV head asks for spans or tokens in
#: host memory; correction: a recall that replaces an earlier step's selection before the attention;
#: reconstruction: a selection for all layers and heads, made between steps; eviction: tokens are given up for good;
#: selection: a KV head chooses what to read of what is on the device.
DECISION_KINDS = ("zoom", "recall", "correction", "reconstruction", "eviction", "selection")
DECISION_UNITS = ("spans", "tokens")
NONE = -1
"""an id that stands for all layers or heads, a count that was not recorded"""


@dataclass(frozen=True)
class Decisions:
    """Decisions of one step, arrays [n] with one entry each. requested = granted + refused + missed.

    A zoom belongs to a query head, every other decision to a KV head. A decision of the method for all layers or KV
    heads has `NONE` there.
    """

    layer: np.ndarray
    """int32"""
    kv_head: np.ndarray
    """int32"""
    q_head: np.ndarray
    """int32; NONE: the decision belongs to the KV head"""
    kind: np.ndarray
    """uint8: place in DECISION_KINDS"""
    unit: np.ndarray
    """uint8: place in DECISION_UNITS of the counts"""
    candidates: np.ndarray
    """int32: among how many was decided; NONE: not recorded"""
    requested: np.ndarray
    """int32, the column `asked`: how many the method asked for; of an eviction, how many it gave up"""
    granted: np.ndarray
    """int32: of these, read in this step's attention; of an eviction and a reconstruction, all"""
    refused: np.ndarray
    """int32: of these, had no room on the device"""
    missed: np.ndarray
    """int32: of these, neither: they came after this step's attention"""
    score: np.ndarray
    """float32: the figure that decided. Of a gate (zoom, correction) its value; of a ranking the highest score that was
    left out; NaN: none"""
    cut: np.ndarray
    """float32: what `score` was compared with. Of a gate its threshold; of a ranking the lowest score that was taken;
    NaN: none"""
    refused_span: np.ndarray
    """int32 [sum of refused]: the refused spans, decision after decision"""
    missed_span: np.ndarray
    """int32 [sum of missed]: the missed spans, decision after decision"""

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def joined(cls, parts: Sequence[Decisions]) -> Decisions | None:
        """Return all decisions in one; None if there are none."""
        filled = [part for part in parts if len(part)]
        if not filled:
            return None
        return cls(*(np.concatenate([getattr(part, field.name) for part in filled]) for field in fields(cls)))

    @classmethod
    def filled(cls, size: int, kind: str, unit: str, columns: Mapping[str, np.ndarray | float]) -> Decisions:
        """Return `size` decisions of one kind. columns: an array [size] or one value for all; those that are left out
        are NONE for ids and candidates, 0 for counts, NaN for figures."""
        values: dict[str, np.ndarray] = {
            "kind": np.full(size, DECISION_KINDS.index(kind), np.uint8),
            "unit": np.full(size, DECISION_UNITS.index(unit), np.uint8),
        }
        for name in ("layer", "kv_head", "q_head", "candidates"):
            values[name] = np.full(size, columns.get(name, NONE), np.int32)
        for name in ("requested", "granted", "refused", "missed"):
            values[name] = np.full(size, columns.get(name, 0), np.int32)
        for name in ("score", "cut"):
            values[name] = np.full(size, columns.get(name, np.nan), np.float32)
        for name in ("refused_span", "missed_span"):
            values[name] = np.asarray(columns.get(name, np.empty(0)), np.int32)
        return cls(**values)


@dataclass(frozen=True)
class Decided:
    """A decision that a method made between steps, for all layers and heads."""

    kind: str
    """one of DECISION_KINDS"""
    candidates: int
    selected: int
    """of the candidates"""
    score: float
    cut: float


def decisions_between(cuts: Sequence[CutRow], decided: Sequence[Decided]) -> Decisions | None:
    """Return the evictions of `cuts` and what a method decided between steps; None if there is neither."""
    parts = []
    if cuts:
        best = [np.nan if np.isnan(cut.score).all() else np.nanmax(cut.score) for cut in cuts]
        dropped = np.array([cut.candidates - cut.kept for cut in cuts])
        columns = {
            "layer": np.array([NONE if cut.layer is None else cut.layer for cut in cuts]),
            "kv_head": np.array([NONE if cut.kv_head is None else cut.kv_head for cut in cuts]),
            "candidates": np.array([cut.candidates for cut in cuts]),
            "requested": dropped,
            "granted": dropped,
            "score": np.array(best),
            "cut": np.array([cut.cut for cut in cuts]),
        }
        parts.append(Decisions.filled(len(cuts), "eviction", "tokens", columns))
    for each in decided:
        counts = {"candidates": each.candidates, "requested": each.selected, "granted": each.selected}
        parts.append(Decisions.filled(1, each.kind, "spans", counts | {"score": each.score, "cut": each.cut}))
    return Decisions.joined(parts)
