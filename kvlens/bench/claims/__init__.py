"""The papers' qualitative claims, checked on a model at hand: a method's part `claims` has `claims(engine, prompts,
report)`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlens import methods
from kvlens.methods import parts

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine


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


def claiming() -> list[str]:
    """The methods that have claims."""
    return [name for name, method in methods.registry().items() if parts.has(method, "claims")]


def check(engine: Engine, names: list[str], prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """The claims of the named methods, `prompts` prompts per point. Raises ValueError for a method without claims."""
    unknown = [name for name in names if name not in claiming()]
    if unknown:
        raise ValueError(f"there are no claims for '{unknown[0]}'; there are some for {', '.join(claiming())}.")
    found: list[Claim] = []
    for name in names:
        module = parts.part(methods.get(name), "claims")
        assert module is not None
        found += module.claims(engine, prompts, report)
    return found
