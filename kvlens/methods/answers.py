"""What hooks return besides a placement and a selection (kvlens/memory/placement.py): the changes after a step, journal
notes, decisions, and the form of spans in the cold tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvlens.memory.memory import Memory
    from kvlens.memory.placement import Eviction, Placement
    from kvlens.methods.run_inputs import Rotate


@dataclass(frozen=True)
class FactorForm:
    """How spans lie in the cold tier as low-rank factors, packed as kvlens/kernels/lowrank.py says."""

    max_rank: int
    """no unit has more components"""
    turn: Rotate | None
    """what reconstructed keys still need: the model's rotary embedding, where they were decomposed without it"""


@dataclass(frozen=True)
class Note:
    """A line of a method's journal; see kvlens.rows.JournalRow."""

    name: str
    values: torch.Tensor
    layer: int | None
    kv_head: int | None


@dataclass(frozen=True)
class Decided:
    """A decision that a method made between steps; see kvlens.decisions.Decisions."""

    kind: str
    """one of kvlens.decisions.DECISION_KINDS"""
    candidates: int
    selected: int
    """of the candidates"""
    score: float
    cut: float


@dataclass
class WindowLeave:
    """Positions [start, end) leave the window and go where `placement` says."""

    start: int
    end: int
    placement: Placement

    def apply(self, memory: Memory) -> None:
        """Let the memory carry it out."""
        memory.leave_window(self.placement, self.start, self.end)


@dataclass
class BagChange:
    """What changes in a bag (Layout.bag) because a step has ended."""

    evicted: Eviction | None = None
    """what gives way to the next step's token; None: a place is free"""
    opened: Placement | None = None
    """spans that decoded tokens belong to from now on, with no kept tokens of their own: nothing moves"""

    def apply(self, memory: Memory) -> None:
        """Let the memory carry it out."""
        if self.opened is not None:
            memory.name(self.opened)
        if self.evicted is not None:
            memory.evictions.evict(self.evicted)
