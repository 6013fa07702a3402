"""The prompt of a call: text, a file, a prompt of kvlens, or chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kvlens.api.errors import RequestError
from kvlens.api.keywordtypes import check_mappings
from kvlens.text.messages import Conversation, conversation, read_conversation
from kvlens.text.prompts import Prompt, PromptText, asking, checked, expecting
from kvlens.text.segments import find_segments

PromptLike = str | Path | Prompt | PromptText | Sequence[Mapping[str, Any]]
"""what `run` and `race` take as their first argument"""
LONGEST_PATH = 255
"""characters of a text that may be the path of a file, at most"""


def prompt_of(
    text: PromptLike,
    ask: str | None,
    answer: str | None,
    needle: str | None,
    segments: Mapping[str, str | tuple[int, int]] | None = None,
) -> Conversation:
    """Return the checked prompt with its question, answer, needle and segments. Raises BadPrompt, BadSegment or
    RequestError, also for the path of a file as a text."""
    refuse_no_text(ask=ask, answer=answer, needle=needle)
    parsed = _read(text)
    prompt = parsed.prompt if ask is None else asking(parsed.prompt, ask)
    prompt = expecting(prompt, answer, needle)
    check_mappings("names to a marker or (start, end)", segments=segments)
    if segments:
        prompt = replace(prompt, segments=find_segments(list(segments.items()), prompt.text))
    return Conversation(prompt, parsed.system, parsed.turns)


def refuse_no_text(**texts: Any) -> None:
    """Raise RequestError `not_a_text` for a keyword that has another type than a text. None: not given."""
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            sentence = f"{name}= takes a text, not {type(value).__name__}: write {name}={str(value)[:40]!r}."
            raise RequestError("not_a_text", sentence, name=name)


def _read(text: PromptLike) -> Conversation:
    if isinstance(text, str):
        _refuse_path(text)
        return Conversation(checked(PromptText(text), "the prompt"), None, ())
    if isinstance(text, Path):
        return read_conversation(text)
    if isinstance(text, Prompt):
        return Conversation(text.source, None, ())
    if isinstance(text, PromptText):
        return Conversation(checked(text, "the prompt"), None, ())
    if isinstance(text, Sequence):
        return conversation(cast("Sequence[Mapping[str, Any]]", text))
    raise RequestError(
        "bad_prompt",
        f"a prompt cannot be a {type(text).__name__}: give a text, a pathlib.Path, a kvlens prompt or chat messages.",
    )


def _refuse_path(text: str) -> None:
    """Raise RequestError `bad_prompt` with the detail `path_as_text` for a text that is the path of a file."""
    if len(text) > LONGEST_PATH or "\n" in text or "\0" in text:
        return
    try:
        exists = Path(text).is_file()
    except (OSError, ValueError):
        return
    if exists:
        sentence = f"the text {text!r} is the path of a file: pass pathlib.Path({text!r}) to run the text in the file."
        raise RequestError("bad_prompt", sentence, detail="path_as_text", path=text)
