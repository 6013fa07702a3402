"""What a table of free text is asked for: its arms, and the trials that they come to."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from kvlens import methods
from kvlens.lab.bench.passages import distinct
from kvlens.lab.bench.tablerequest import ComparedRequest

FLOORS = ("bfloat16", "float16")


@dataclass(frozen=True)
class Planned:
    """A trial: a passage under an arm."""

    index: int
    method: str
    budget: str
    dtype: str

    @property
    def key(self) -> str:
        """The trial's name in the file of kept lines."""
        return f"{self.index}/{self.method}/{self.budget}/{self.dtype}"


class FreeTextRequest(ComparedRequest):
    """What to measure; the reference stands for full KV in other number formats."""

    budgets: tuple[str, ...] = ("10%", "20%", "40%")
    length: int = Field(1024, ge=64)
    """tokens of context"""
    tokens: int = Field(64, ge=64)
    """fed behind it, each of them compared"""
    passages: int = Field(10, ge=1)
    first_seed: int = 7_000_000
    batch: int = Field(1, ge=1)
    """trials of a passage whose steps are computed together, at most"""

    def arms(self) -> list[tuple[str, str, str]]:
        """(method, budget, number format) that every passage is run under beside its reference."""
        floors = [(methods.REFERENCE, "", dtype) for dtype in FLOORS]
        return floors + [
            (name, budget, "float32") for name in self.methods if name != methods.REFERENCE for budget in self.budgets
        ]

    def trials(self) -> list[Planned]:
        """All trials, passage by passage."""
        return [Planned(index, *arm) for index in distinct(self.first_seed, self.passages) for arm in self.arms()]
