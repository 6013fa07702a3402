"""What a checked claim is. How one is checked: check.py; arms of a statement and what they come to: arms.py, judged.py;
all of them in words: page.py."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


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


def written(claim: Claim) -> dict[str, Any]:
    """A claim as plain JSON: the missing bound of an interval is None, as JSON has no infinity."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: plain(value) for key, value in dataclasses.asdict(claim).items()}
