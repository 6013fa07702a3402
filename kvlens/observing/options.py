"""What a caller asks of an observation: the one place of its names and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlens.holds import Drop, Hold
    from kvlens.store.reader import TraceReader


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keywords of `kvlens.observe`, which documents them, and what a repeat holds and drops."""

    answer: str | None = None
    needle: str | None = None
    row: int = 0
    shadow: bool = True
    compare: bool = True
    oracle: str = "auto"
    name: str | None = None
    holds: Sequence[Hold] = ()
    drops: Sequence[Drop] = ()
    parent: TraceReader | None = None
    """the run that is repeated"""


DEFAULTS = Options()
