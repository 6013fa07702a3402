"""What a method lends to others: the part of it that another method's score, or storage, can be put into. A composed
name ('PART:METHOD', 'METHOD+PART') joins them (kvlens/methods/composition.py). Plain data; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Lent:
    """A part of a method, as a class that goes before the other method's in the order of resolution."""

    word: str
    """the part in a composed name"""
    hooks: type
    """the hooks that the part brings; they call `super()` for the other method's"""
    parameters: type
    """frozen dataclass of the part's parameters, without a base"""
    adds: str
    """what the part does, as the end of a summary: 'in whole chunks'"""
    refuses: Callable[[type[Any]], str]
    """why a method cannot take the part, in a few words; '': it can"""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """fields of Needs that the part sets"""


@dataclass(frozen=True)
class Lending:
    """What a method's class declares (`lends`): how its name joins another one."""

    front: Lent | None = None
    """in front, with a colon: units or scores"""
    storage: Lent | None = None
    """behind, with a plus: storage"""
    trigger: Lent | None = None
    """behind, with an at sign: when the other method selects anew"""
