"""The prompt of a stored run, as it was given. No torch."""

from __future__ import annotations

from kvlens.meta import RunMeta
from kvlens.text.prompts import PromptText
from kvlens.text.segments import Segment


def stored_prompt(meta: RunMeta, text: str) -> PromptText:
    """Return the prompt that a run's meta describes. text: the prompt's text, as it was stored with the run."""
    return PromptText(
        text,
        meta.answer,
        meta.needle,
        meta.task,
        answer_prefix=meta.answer_prefix or "",
        question=meta.question_start,
        answers=meta.answers,
        segments=tuple(Segment(*part) for part in meta.segment_ranges),
    )
