"""Checked claims, and the prompts of those that are no comparison of arms.

How claims are checked: check.py. Arms of a statement: arms.py; what they show: compared.py, judged.py, words.py;
verdicts over the claims of a paper: family.py; how many prompts are needed: plan.py; figures judged again: stored.py;
the page: page.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlens.models.find import DEMO


@dataclass(frozen=True)
class Test:
    """What the prompts show for a claim and against it. The verdict needs the paper's other claims (family.py)."""

    n: int
    """pairs of trials, or trials, of the comparison that has the fewest"""
    p_holds: float
    """one-sided p of the figures, if the claim were false"""
    p_fails: float
    """one-sided p of the figures, if the claim were true"""
    needs: int | None = None
    """n that decides it with 80 % probability (plan.py); None if more prompts would not decide it"""
    refuted: str = ""
    """the reason, if it does not hold"""
    undecided: str = ""
    """the reason, if it is not decided"""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper and what was found here."""

    method: str
    source: str
    """where the paper says it: 'Table 9'"""
    says: str
    """the claim in our words, one sentence"""
    measured: str
    """what was measured here, one sentence with figures, units and n"""
    holds: bool | None
    """None: what was measured cannot decide it"""
    reason: str = ""
    """why it does not hold, or cannot be decided, here"""
    figures: dict[str, Any] = field(default_factory=dict)
    """the numbers behind it, plain JSON"""
    test: Test | None = None
    """None: it was decided by a count, without a sample of prompts"""


def written(claim: Claim) -> dict[str, Any]:
    """A claim as plain JSON: the missing bound of an interval is None, as JSON has no infinity."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: plain(value) for key, value in dataclasses.asdict(claim).items()}


def read(row: Mapping[str, Any]) -> Claim:
    """Return the claim that `written` made plain."""
    test = row.get("test")
    return Claim(**{**row, "test": Test(**test) if test else None})


@dataclass(frozen=True)
class Setting:
    """The prompts of a claim that is no comparison of arms."""

    model: str
    tasks: tuple[str, ...]
    length: int
    """tokens of a prompt"""

    def about(self, prompts: int) -> str:
        """Return the setting in words; prompts: number of prompts per task."""
        return f"{self.model}, {prompts} prompts of each of {', '.join(self.tasks)}, {self.length:,} tokens"


def setting_of(model: str) -> Setting:
    """Return the prompts for a model: tasks in its own language for the toy, real prose for any other model."""
    if model == DEMO:
        return Setting(model, ("multikey", "chain", "note"), 2048)
    return Setting(model, ("niah_single", "niah_multikey", "niah_identifier"), 1024)
