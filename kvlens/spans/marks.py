"""Which tokens may end a chunk and how strongly they do: S(b) of sentence-level compression (an ICLR 2026 submission)
as data. The paper's own table is its
figure 9, a picture of token ids per tokenizer; these weights are ours and are resolved against token texts, so they
hold for any tokenizer.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from kvlens.refusal import Refusal

WEIGHTS: dict[str, float] = {
    **dict.fromkeys((".", "?", "!", "。", "．", "｡", "？", "！", "\n\n"), 1.0),
    "\n": 0.9,
    **dict.fromkeys((";", ":", "；", "："), 0.7),
    **dict.fromkeys((",", "，", "、", "–", "—"), 0.4),
}
"""mark -> S(b)"""

SETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "one": (".",),
    "mid": (".", "?", "!", "\n", "\n\n"),
    "full": tuple(WEIGHTS),
}
"""Named choices of marks. 'any', no table: every token that ends with punctuation or a line break, all with weight
1."""

SET_OF_MODEL: dict[str, str] = {"longchat": "one", "mistral": "mid", "deepseek-r1-distill-llama": "full"}
"""Part of a model's name -> the set the paper chose for it (appendix A)."""

OTHERWISE = "mid"
"""For models the paper does not name."""


@dataclass(frozen=True)
class Mark:
    """What makes a token a boundary."""

    text: str
    weight: float


def set_for(model: str) -> str:
    """Name of the set of marks for a model."""
    name = model.lower()
    return next((marks for part, marks in SET_OF_MODEL.items() if part in name), OTHERWISE)


def mark_of(piece: str, marks: str) -> Mark | None:
    """The mark of the set `marks` that a token's text ends with (the longest one counts), spaces after it aside; None:
    no boundary.

    Raises ValueError for an unknown set.
    """
    text = piece.rstrip(" ")
    if marks == "any":
        return Mark(text[-1], 1.0) if text and _is_punctuation(text[-1]) else None
    if marks not in SETS:
        raise Refusal(
            f"there is no set of marks '{marks}'; there are {', '.join(SETS)} and any.",
            code="unknown_marks",
            marks=marks,
        )
    ending = [mark for mark in SETS[marks] if text.endswith(mark)]
    best = max(ending, key=len, default=None)
    return None if best is None else Mark(best, WEIGHTS[best])


def _is_punctuation(character: str) -> bool:
    return character == "\n" or unicodedata.category(character).startswith("P")
