"""A run with offload as a row of the result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OffloadRow:
    """A run of a pretrained model under a method that moves KV between the tiers, through the engine. Bytes and seconds
    of all decode steps of the recorded run; None: it was not run, with the reason."""

    method: str
    model: str
    dtype: str
    context: int
    """tokens of the prompt"""
    budget: str
    steps: int
    tokens_per_s: float | None = None
    """by the median step, not recorded"""
    recorded_tokens_per_s: float | None = None
    same: bool | None = None
    """both runs came to the same tokens"""
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    waited: float | None = None
    """the model stood still for copies"""
    moving: float | None = None
    """at least one copy was under way"""
    overlapped: float | None = None
    """share of `moving` that passed while the model did not stand still for a copy, at the least"""
    peak_bytes: int | None = None
    """of KV on the device"""
    cold_bytes: int | None = None
    """of KV in host memory, at the last step"""
    checks: int = 0
    failed: Sequence[str] = ()
    """self-checks of the recorded run"""
    trace: str | None = None
    """uid of the stored run; None: it was not stored"""
    stand_in: str | None = None
    """parts of the method that were untrained or uncalibrated; '': none; None: those of its defaults"""
    note: str = ""
    reason: str | None = None
    kind: Literal["offload"] = "offload"

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is wrong with what was run, each in a few words."""
        return (*self.failed, *(["tokens differ when recorded"] if self.same is False else []))

    @property
    def passed(self) -> bool | None:
        """Of what was run, nothing is wrong; None: it was not run."""
        return None if self.reason is not None else not self.wrong
