"""The prompt of the 'Run the sample prompt' button for a real model: a question about a real text in which one sentence
has been hidden."""

from __future__ import annotations

from itertools import accumulate

from kvlens.tasks.needles import fact
from kvlens.tasks.texts import EVALUATION, sentences
from kvlens.text.prompts import PromptText

TITLE = EVALUATION.title
NAME, ANSWER = "Clara Whitfield", "48213"
HIDDEN = fact(NAME, ANSWER)
QUESTION = f"What is the library card number of {NAME}?"
OPENING = f"The library card number of {NAME} is"
CHARACTERS = 4800
"""of the text; about a thousand tokens"""
DEPTH = 0.4


def sample_prompt() -> PromptText:
    """The text's first sentences, the hidden one at two fifths of them, and the question."""
    text = sentences()
    ends = list(accumulate(len(sentence) + 1 for sentence in text))
    count = next(index for index, end in enumerate(ends) if end > CHARACTERS)
    previous = next(index for index, end in enumerate(ends) if end > DEPTH * CHARACTERS)
    start = " ".join(text[:previous]) + " "
    whole = f"{start}{HIDDEN} {' '.join(text[previous:count])}\n\n{QUESTION}"
    needle, question = (len(start), len(start) + len(HIDDEN)), len(whole) - len(QUESTION) - 2
    return PromptText(whole, f" {ANSWER}", (needle,), None, None, OPENING, question)
