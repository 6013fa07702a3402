"""How an answer is called, wherever one is judged."""

from __future__ import annotations


def answer_words(answer: bool | None, cut_off: bool) -> str:
    """Return 'right answer', 'wrong answer' or 'wrong answer, cut off'; '' where no answer is known."""
    words = {True: "right answer", False: "wrong answer", None: ""}[answer]
    return f"{words}, cut off" if cut_off else words
