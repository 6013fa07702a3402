"""What a table and a column of the open trace format are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT = "kvlens-trace"
VERSION = 3
"""1: the first; 2: the tables phase, cut and effect, and full KV's own unread mass in oracle; 3: the table span_key"""
INTEGER, FLOAT, TEXT, FLAG = "integer", "float", "text", "flag"
INTEGERS, FLOATS, FLAGS = "list of integers", "list of floats", "list of flags"
LISTS = (INTEGERS, FLOATS, FLAGS)
IDS = (
    "step",
    "layer",
    "q_head",
    "kv_head",
    "span",
    "pos",
    "refused_span",
    "missed_span",
    "lost_pos",
    "reference_lost_pos",
)
"""columns whose values name a row of the run: their range is the run's sizes"""


@dataclass(frozen=True)
class Column:
    """A column of the format. Rows have no value (NULL) where it was not recorded, unless it is required."""

    kind: str
    meaning: str
    unit: str = ""
    required: bool = False
    least: float | None = None
    most: float | None = None
    """the range of a number; None: any finite number, of an integer from 0"""
    words: tuple[str, ...] = ()
    """the words that a text may be; empty: any"""
    infinite: bool = False
    """a number may be infinite"""

    @property
    def rule(self) -> str:
        """The rule of a value, in words."""
        if self.words:
            return ", ".join(self.words)
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return "infinite where a token has no probability" if self.infinite else ""


@dataclass(frozen=True)
class Table:
    """A table of the format."""

    meaning: str
    """one row per what"""
    adds: str
    """what pages can show with it"""
    columns: Mapping[str, Column]
    key: tuple[str, ...] = ()
    """columns that no two rows have in common; empty: none"""
    required: bool = False
    between: bool = False
    """rows of step -1, the end of prefill, are allowed"""
    equal_lists: tuple[tuple[str, ...], ...] = field(default=())
    """columns whose lists have one length"""
