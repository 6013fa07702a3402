"""The prompt of the 'Run the sample prompt' button for a real model: a question about a real text, kvlens' own licence,
in which one sentence has been hidden."""

from __future__ import annotations

from kvlens import REPOSITORY
from kvlens.prompts import PromptText

HIDDEN = "The access code of the north gate is 48213."
QUESTION = "What is the access code of the north gate?"
OPENING = "The access code of the north gate is"
ANSWER = "48213"
CHARACTERS = 4800
"""of the licence; about a thousand tokens"""
DEPTH = 0.4


def sample_prompt() -> PromptText:
    """The licence's first sentences, the hidden one at two fifths of them, and the question."""
    words = " ".join((REPOSITORY / "LICENSE").read_text(encoding="utf-8").split())
    text = words[: words.index(". ", CHARACTERS) + 1]
    at = text.index(". ", int(DEPTH * len(text))) + 2
    whole = f"{text[:at]}{HIDDEN} {text[at:]}\n\n{QUESTION}"
    return PromptText(whole, f" {ANSWER}", ((at, at + len(HIDDEN)),), None, None, OPENING)
