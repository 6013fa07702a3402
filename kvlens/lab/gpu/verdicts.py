"""What two ways of a step chose, and whether they are equal or tie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TIE = 1e-4
"""scores that lie closer than this share of themselves, or of the head's median one, are equal but for rounding
(fp32)"""


@dataclass(frozen=True)
class Choice:
    """What one call came to. step -1: when the prompt was placed; layer None: alike in all layers."""

    step: int
    layer: int | None
    subject: str
    table: torch.Tensor
    """[H_kv|1, ..., N], bool or numbers"""
    score: torch.Tensor | None = None
    """by what it was chosen, of a shape that goes with it; NaN: not by that"""


@dataclass(frozen=True)
class Verdict:
    """How far two runs chose alike. margin: of the first difference, as a share of the scores; 0: none differs; None:
    nothing says how close it was."""

    text: str
    margin: float | None = 0.0
    step: int | None = None
    """of the first difference"""

    @property
    def equal(self) -> bool:
        return self.step is None

    @property
    def tie(self) -> bool:
        return not self.equal and self.margin is not None and self.margin <= TIE
