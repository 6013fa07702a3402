"""From a person's file or text to a validated prompt: decoded strictly, with token ids and character offsets."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAX_BYTES = 5 * 2**20
SUFFIXES = (".txt", ".md", ".json")
_HALF = re.compile(r"[\ud800-\udfff]")


class BadPrompt(ValueError):
    """What is wrong with the prompt and what to do about it, in one sentence."""


@dataclass(frozen=True)
class PromptText:
    """What the user gave. needle: character ranges [start, end) that hold the answer, where known."""

    text: str
    answer: str | None = None
    needle: tuple[tuple[int, int], ...] = ()
    task: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt. pieces: the text of each token; offsets: character range of each token, None for special
    tokens."""

    source: PromptText
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    offsets: tuple[tuple[int, int] | None, ...]


def decode(data: bytes, name: str) -> PromptText:
    """Bytes of an upload -> text. `.json` is an object with "text" and, if known, "answer", "needle" ([[start, end],
    ...]), "task".

    Raises BadPrompt for too many bytes, not UTF-8, NUL characters, empty text or JSON of another form.
    """
    if len(data) > MAX_BYTES:
        raise BadPrompt(f"{name} has {len(data):,} bytes; at most {MAX_BYTES:,} are accepted: cut it down.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadPrompt(
            f"{name} is not UTF-8 text (byte {error.start:,} cannot be decoded): save it as UTF-8."
        ) from None
    if Path(name).suffix.lower() == ".json":
        return _from_json(text, name)
    return checked(PromptText(text), name)


def checked(prompt: PromptText, name: str) -> PromptText:
    """Raises BadPrompt when the text is empty or holds NUL characters, or a needle lies outside it."""
    if not prompt.text.strip():
        raise BadPrompt(f"{name} is empty: give a text to run.")
    if _HALF.search("".join((prompt.text, prompt.answer or "", prompt.task or ""))):
        raise BadPrompt(f"{name} holds half of a character (a lone surrogate), which is no text: save it as UTF-8.")
    if "\x00" in prompt.text:
        raise BadPrompt(f"{name} contains NUL characters, so it is not plain text.")
    for start, end in prompt.needle:
        if not 0 <= start < end <= len(prompt.text):
            raise BadPrompt(f"{name}: the needle {start}-{end} lies outside the text of {len(prompt.text)} characters.")
    return prompt


def expecting(prompt: PromptText, answer: str | None, passage: str | None) -> PromptText:
    """The prompt with what its owner expects. answer: what a right output says; passage: words of the text that hold
    it, every place where they stand is marked. None or blank: as the prompt has it.

    Raises BadPrompt when the passage is not in the text.
    """
    if answer and answer.strip():
        prompt = checked(replace(prompt, answer=answer.strip()), "the expected answer")
    if passage and passage.strip():
        words = passage.strip()
        places = [found.span() for found in re.finditer(re.escape(words), prompt.text)]
        if not places:
            raise BadPrompt(f"the passage '{words[:60]}' is not in the prompt: give it exactly as it stands there.")
        prompt = replace(prompt, needle=tuple(places))
    return prompt


def _from_json(text: str, name: str) -> PromptText:
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise BadPrompt(f"{name} is not valid JSON ({error}).") from None
    except RecursionError:
        raise BadPrompt(f"{name} is JSON nested too deep to be read: give the text in one object.") from None
    if not isinstance(data, dict) or not isinstance(data.get("text"), str):
        raise BadPrompt(f'{name} must be a JSON object with a string "text".')
    try:
        needle = tuple((int(start), int(end)) for start, end in data.get("needle") or ())
    except (TypeError, ValueError, OverflowError):
        raise BadPrompt(f'{name}: "needle" must be a list of [start, end] character ranges.') from None
    answer, task, seed = data.get("answer"), data.get("task"), data.get("seed")
    return checked(
        PromptText(
            data["text"],
            answer if isinstance(answer, str) else None,
            needle,
            task if isinstance(task, str) else None,
            seed if isinstance(seed, int) and 0 <= seed < 1 << 63 else None,
        ),
        name,
    )


def tokenize(source: PromptText, tokenizer: Any, max_positions: int, max_new: int) -> Prompt:
    """Token ids with the tokenizer's own special tokens, offsets into the text.

    Raises BadPrompt when the prompt has fewer than 2 tokens or does not fit the model together with `max_new` tokens.
    """
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(source.text, return_offsets_mapping=fast, return_attention_mask=False)
    ids: Sequence[int] = encoded["input_ids"]
    if len(ids) < 2:
        raise BadPrompt(f"the prompt has {len(ids)} token(s); at least 2 are needed.")
    if len(ids) + max_new > max_positions:
        raise BadPrompt(
            f"the prompt has {len(ids):,} tokens and {max_new:,} more were asked for, but the model takes "
            f"{max_positions:,}: "
            "shorten the prompt or lower --max-new."
        )
    ranges = encoded["offset_mapping"] if fast else [(0, 0)] * len(ids)
    offsets = tuple((int(a), int(b)) if b > a else None for a, b in ranges)
    pieces = tuple(source.text[o[0] : o[1]] if o else tokenizer.decode([i]) for i, o in zip(ids, offsets, strict=True))
    return Prompt(source, tuple(ids), pieces, offsets)
