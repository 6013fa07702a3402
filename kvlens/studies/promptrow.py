"""One row of a file of prompts: a question with its context, a text, or chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvlens import tasks
from kvlens.tasks.base import Encoding
from kvlens.text.messages import conversation
from kvlens.text.prompts import BadPrompt, PromptText, asking, checked, expecting, with_segments

NAMES = (
    "id",
    "group",
    "text",
    "context",
    "question",
    "messages",
    "answer",
    "answers",
    "needle",
    "answer_prefix",
    "task",
    "seed",
    "question_start",
    "segments",
    "drawn",
    "forced",
)
"""names of a row's fields; others are left unread"""
PROSE = ("text", "context", "question", "forced")
"""of these, texts that a number is not"""


@dataclass(frozen=True)
class StudyPrompt:
    """A prompt of a study."""

    id: str
    """names it in the study"""
    source: PromptText
    group: str = ""
    """prompts that are also counted apart: a task, a kind of document"""
    system: str | None = None
    turns: tuple[tuple[str, str], ...] = field(default=())
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """what makes a prompt of a task again (`kvlens.tasks.remake`): task, length, depth, seed, index; {} of others"""
    forced: str = ""
    """text that goes on from the prompt's: it is fed in place of the method's own choices, and every token is compared
    with full KV on the same text. Both are read as they are, without the chat form"""

    @property
    def content(self) -> str:
        """What makes two prompts the same one: a repeat is no second observation."""
        row = {**self.row(), "id": "", "group": "", "drawn": {}, "segments": {}}
        return json.dumps(row, sort_keys=True, default=str)

    def row(self) -> dict[str, Any]:
        """Return the prompt as a study's file keeps it, which `prompt_of` reads."""
        source = self.source
        row = {
            "id": self.id,
            "group": self.group or source.task,
            "text": source.text,
            "answers": [text for text in (source.answer, *source.answers) if text],
            "needle": [list(place) for place in source.needle],
            "task": source.task,
            "seed": source.seed,
            "answer_prefix": source.answer_prefix,
            "question_start": source.question,
            "segments": {part.name: [part.start, part.end] for part in source.segments},
            "system": self.system,
            "turns": [list(turn) for turn in self.turns],
            "drawn": dict(self.drawn),
            "forced": self.forced,
        }
        return {name: value for name, value in row.items() if value not in (None, "", [], {})}


def task_prompt(
    task: str, length: int | None, depth: float | None, seed: int, index: int, encoding: Encoding, prompt_id: str
) -> StudyPrompt:
    """Return prompt `index` of a task, which belongs to the group of its task. Raises ValueError with one sentence."""
    drawn = {"task": task, "length": length, "depth": depth, "seed": seed, "index": index}
    kind, colon, path = task.partition(":")
    group = f"{kind}:{Path(path).name}" if colon else task
    return StudyPrompt(prompt_id, tasks.prompt_of(tasks.remake(drawn, encoding)), group, drawn=drawn)


def prompt_of(row: Mapping[str, Any], default_id: str, name: str) -> StudyPrompt:
    """Return the prompt of a row. It has `messages` (chat), `text`, or `question` with or without `context`. Where they
    are known it has `answer` or `answers`, `needle` (words of the prompt, or character ranges), `segments` (names with
    a marker or a character range), `id` and `group`, and `forced`, a text that is fed in place of an answer.

    Args:
        default_id: the prompt's id where the row has none.
        name: what a refusal calls the row, for example "line 3".

    Raises BadPrompt or BadSegment with one sentence.
    """
    if not isinstance(row, Mapping):
        raise BadPrompt(f"{name} is no object with fields: give a question or a text in it.")
    system, turns = _value(row, "system"), tuple((str(role), str(text)) for role, text in _value(row, "turns") or ())
    if _value(row, "messages") is not None:
        spoken = conversation(_list(row["messages"], name, "messages"))
        source, system, turns = spoken.prompt, spoken.system, spoken.turns
    else:
        source = _plain(row, name)
    source = with_segments(_answered(source, row, name), _segment_pairs(row, name))
    drawn = row.get("drawn")
    about = dict(drawn) if isinstance(drawn, Mapping) else {}
    prompt_id, forced = _text(row, "id", name) or default_id, _text(row, "forced", name)
    return StudyPrompt(prompt_id, source, _group(row, name), system, turns, about, forced)


def _plain(row: Mapping[str, Any], name: str) -> PromptText:
    text, context, question = (_text(row, field_name, name) for field_name in ("text", "context", "question"))
    if text and (question or context):
        raise BadPrompt(f'{name} has a "text" beside its "question": call the text "context", or leave one out.')
    if text:
        start = row.get("question_start")
        return checked(PromptText(text, question=start if isinstance(start, int) else None), name)
    if not question:
        raise BadPrompt(f'{name} has no "question", "text" or "messages": give one of them.')
    return asking(PromptText(context), question) if context else checked(PromptText(question), name)


def _answered(source: PromptText, row: Mapping[str, Any], name: str) -> PromptText:
    """The prompt with what is expected of it."""
    several = _value(row, "answers")
    answers = [] if several is None else [_word(item, name, "answers") for item in _list(several, name, "answers")]
    answers.insert(0, _text(row, "answer", name))
    answers = [text for text in answers if text.strip()]
    needle, seed = _value(row, "needle"), _value(row, "seed")
    source = replace(
        source,
        answer=answers[0] if answers else None,
        answers=tuple(answers[1:]),
        task=_text(row, "task", name) or None,
        seed=seed if isinstance(seed, int) and 0 <= seed < 1 << 63 else None,
        answer_prefix=_text(row, "answer_prefix", name) or source.answer_prefix,
    )
    if isinstance(needle, str):
        return checked(expecting(source, None, needle), name)
    try:
        places = tuple((int(start), int(end)) for start, end in needle or ())
    except (TypeError, ValueError):
        raise BadPrompt(f'{name}: "needle" is neither words of the prompt nor a list of [start, end].') from None
    return checked(replace(source, needle=places), name)


def _segment_pairs(row: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Return (name, marker or range) of each named segment of a row; `find_segments` refuses other places."""
    named = _value(row, "segments") or {}
    if not isinstance(named, Mapping):
        raise BadPrompt(f'{name}: "segments" must be an object of names with a marker or [start, end].')
    return [(str(part), place) for part, place in named.items()]


def _group(row: Mapping[str, Any], name: str) -> str:
    return _text(row, "group", name) or _text(row, "task", name)


def _text(row: Mapping[str, Any], field_name: str, name: str) -> str:
    value = _value(row, field_name)
    if field_name in PROSE and value is not None and not isinstance(value, str):
        raise BadPrompt(f'{name}: "{field_name}" is no text.')
    return "" if value is None else _word(value, name, field_name)


def _value(row: Mapping[str, Any], field_name: str) -> Any:
    """A field's value; None where there is none, which pandas writes as NaN."""
    value = row.get(field_name)
    return None if isinstance(value, float) and value != value else value


def _word(value: Any, name: str, field_name: str) -> str:
    """A text; a number stands for its digits."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadPrompt(f'{name}: "{field_name}" is no text.')
    return str(value).replace("\r\n", "\n")


def _list(value: Any, name: str, field_name: str) -> Sequence[Any]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        raise BadPrompt(f'{name}: "{field_name}" is no list.')
    return value
