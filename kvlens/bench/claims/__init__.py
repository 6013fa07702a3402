"""The papers' qualitative claims, checked on a model at hand: one module per method, each with `claims(engine, prompts,
report)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

METHODS = ("sekv", "chess", "freekv", "sentkv", "compresskv")


@dataclass(frozen=True)
class Claim:
    """One statement of a paper and what was found here."""

    method: str
    source: str
    """where the paper says it: 'FreeKV Table 9'"""
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


def check(engine: Engine, names: list[str], prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """The claims of the named methods, `prompts` prompts per point. Raises ValueError for a method without claims."""
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"there are no claims for '{unknown[0]}'; there are some for {', '.join(METHODS)}.")
    found: list[Claim] = []
    for name in names:
        found += importlib.import_module(f"{__name__}.{name}").claims(engine, prompts, report)
    return found
