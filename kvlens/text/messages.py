"""Chat messages as a prompt: the list of {"role", "content"} that chat models take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlens.files import RefusedFile, read_bounded
from kvlens.text.promptfiles import MAX_BYTES, decode, read_prompt
from kvlens.text.prompts import BadPrompt, PromptText, checked

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation:
    """Messages, taken apart as a run takes them."""

    prompt: PromptText
    """the last message of the user; words of the assistant behind it are its `answer_prefix`"""
    system: str | None
    turns: tuple[tuple[str, str], ...]
    """(role, text) of the messages between the system's and the last one of the user"""


def read_conversation(path: Path) -> Conversation:
    """Return the checked prompt of a file; a .json file with "messages" is a conversation. Raises BadPrompt."""
    if path.suffix.lower() == ".json" and path.is_file():
        try:
            spoken = _spoken(read_bounded(path, MAX_BYTES), path.name)
        except RefusedFile:
            spoken = None  # read_prompt says what is wrong
        if spoken is not None:
            return spoken
    return Conversation(read_prompt(path), None, ())


def decode_conversation(data: bytes, name: str) -> Conversation:
    """Return the checked prompt of a file's bytes, as `read_conversation` does of a path. Raises BadPrompt."""
    spoken = _spoken(data, name) if name.lower().endswith(".json") else None
    return Conversation(decode(data, name), None, ()) if spoken is None else spoken


def _spoken(data: bytes, name: str) -> Conversation | None:
    """The conversation of a JSON file with "messages"; None of any other."""
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list) or "text" in content:
        return None
    parsed = conversation(content["messages"])
    rest = {key: value for key, value in content.items() if key != "messages"} | {"text": parsed.prompt.text}
    prefix = {"answer_prefix": parsed.prompt.answer_prefix} if parsed.prompt.answer_prefix else {}
    return replace(parsed, prompt=decode(json.dumps(rest | prefix).encode(), name))


def conversation(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return the messages as a prompt with its earlier turns. Raises BadPrompt, one sentence, for messages of another
    form and for a conversation that does not end with the user or with the beginning of an answer."""
    turns = [_turn(number, message) for number, message in enumerate(messages)]
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else None
    prefix = turns.pop()[1] if turns and turns[-1][0] == "assistant" else ""
    if not turns or turns[-1][0] != "user":
        raise BadPrompt("the messages hold no last message of the user: end them with one.")
    text = turns.pop()[1]
    return Conversation(checked(PromptText(text, answer_prefix=prefix), "the last message"), system, tuple(turns))


def _turn(number: int, message: Mapping[str, Any]) -> tuple[str, str]:
    role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
    if role not in ROLES or not isinstance(content, str):
        raise BadPrompt(
            f'message {number} is no {{"role": ..., "content": ...}} with a role of {", ".join(ROLES)} and a text.'
        )
    return str(role), content
