"""Where the answer of a full-KV run ends, and whether that run gives the known answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlens import tasks

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.models import LoadedModel
    from kvlens.text.prompts import Prompt

ANSWER_STEPS = 32
"""steps of an answer from the step of loss on, at most"""


def gives_answer(loaded: LoadedModel, prompt: Prompt, reference: Reference) -> bool:
    """Return whether the prompt's answer is known and full KV gives it."""
    source, text = prompt.source, loaded.decode(reference.ids[len(prompt.asked) :])
    return source.answer is not None and tasks.is_right(source.task, source.answer, text, source.answers)


def answer_end(loaded: LoadedModel, prompt: Prompt, reference: Reference, step: int, has_answer: bool) -> int:
    """Return the step after the answer, at most ANSWER_STEPS behind the step of loss: where the answer is known, behind
    the token that follows it in full KV's text, or the line on which the step of loss lies; the step after `step` where
    no answer is known. has_answer: the answer is known and full KV gives it (`gives_answer`)."""
    if not has_answer:
        return step + 1
    ids, decode, question_tokens = reference.ids, loaded.tokenizer.decode, len(prompt.asked)
    last = min(len(ids), step + ANSWER_STEPS)
    ends = range(step + 1, last + 1)
    source = prompt.source
    assert source.answer is not None
    for end in ends:
        if tasks.is_right(source.task, source.answer, loaded.decode(ids[question_tokens:end]), source.answers):
            return min(end + 1, last)
    return next((end for end in ends if "\n" in decode([ids[end - 1]])), last)
