"""Decisions that depend on meaning, made by rate: which pages each head wants at each step, and which heads are
corrected.

A head's wishes are a window sliding over a random order of its pages, so that every step misses exactly so many and the
pattern closes without a jump. All layers share the wishes; each has its own slots and its own corrections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def wishes(heads: int, pages: int, wanted: int, missed: int, alike: bool = False) -> torch.Tensor:
    """[steps, heads, wanted] int32, pages of each head, none twice in a step. alike: all heads want the same pages."""
    assert 1 <= missed <= wanted
    assert wanted + missed <= pages
    steps = pages // math.gcd(pages, missed)
    order = torch.stack([torch.randperm(pages)] * heads if alike else [torch.randperm(pages) for _ in range(heads)])
    place = (torch.arange(steps)[:, None] * missed + torch.arange(wanted)) % pages
    return order[:, place].permute(1, 0, 2).int().contiguous()


def corrections(steps: int, layers: int, heads: int, rate: float) -> torch.Tensor:
    """[steps, layers, heads] int32, 1 where the head is corrected: independent draws."""
    return (torch.rand(steps, layers, heads) < rate).int()


@dataclass
class Counter:
    """The number of the step, on the device, so that a captured step moves on by itself."""

    value: torch.Tensor
    steps: int

    @classmethod
    def zero(cls, steps: int, at: torch.device) -> Counter:
        return cls(torch.zeros(1, dtype=torch.int64, device=at), steps)

    def pick(self, table: torch.Tensor) -> torch.Tensor:
        """The row of this step."""
        return table.index_select(0, self.value)[0]

    def advance(self) -> None:
        self.value.add_(1).remainder_(self.steps)
