"""How a method looks on every figure and page: its family's colour, its own symbol and dash. No list names a method."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens import methods
from kvlens.app.figures.theme import BLUE, BROWN, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from kvlens.methods.base import FAMILIES
from kvlens.methods.composition import innermost
from kvlens.methods.naming import installed

#: One colour per family, legible on light and dark.
FAMILY_COLORS = {
    "reference": SKY,
    "prompt_eviction": ORANGE,
    "decode_eviction": PURPLE,
    "page_retrieval": BLUE,
    "token_retrieval": GREEN,
    "span_retrieval": VERMILION,
    "quantisation": BROWN,
    "other": GREY,
}
#: Plotly's name and the character that stands for it in text.
SYMBOLS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "cross": "✚",
    "star": "★",
    "x": "✖",
    "triangle-down": "▼",
    "pentagon": "⬟",
    "hexagon": "⬢",
    "bowtie": "⧓",
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True)
class Mark:
    """A method's look, for Plotly."""

    color: str
    symbol: str
    dash: str
    character: str
    """the symbol as a character"""
    family: str


def mark(name: str) -> Mark:
    """The look of a method; that of one that is not installed here is 'other', first of all. A composed method looks
    like the method that it is built on.

    A family begins with a symbol of its own and goes on from there in the order of `kvlens.methods.registry`, so that
    no two of a family look alike until the symbols are used up, and families differ by more than their colour."""
    method_class = installed(name)
    family = "other" if method_class is None else method_class.family
    base = name if method_class is None else innermost(method_class).name
    members, names = methods.of_family(family), list(SYMBOLS)
    place = members.index(base) if base in members else 0
    symbol = names[(list(FAMILIES).index(family) + place) % len(names)]
    return Mark(FAMILY_COLORS[family], symbol, DASHES[place % len(DASHES)], SYMBOLS[symbol], family)
