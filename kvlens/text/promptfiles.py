"""A person's prompt file: its bytes, decoded strictly, as a checked prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlens.files import RefusedFile, read_bounded
from kvlens.text.prompts import BadPrompt, PromptText, checked
from kvlens.text.segments import find_segments

MAX_BYTES = 5 * 2**20
SUFFIXES = (".txt", ".md", ".json")
_LISTS = (".jsonl", ".jsonl.gz")
"""ends of the names of files that hold one prompt per line"""


def decode(data: bytes, name: str) -> PromptText:
    """Return the prompt in the bytes of a file. `.json` is an object with "text" and, if known, "answer" (a string or
    an integer), "answers" (a list of others that are right as well), "needle" ([[start, end], ...]), "task",
    "answer_prefix", "question" (the character with which it begins). The text has LF for CRLF, and no byte order mark.

    Raises BadPrompt for a file of many prompts, too many bytes, not UTF-8, NUL characters, empty text or JSON of
    another form.
    """
    if name.lower().endswith(_LISTS):
        raise BadPrompt(f"{name} holds one prompt per line (JSON Lines): give one prompt as .txt or .json.")
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
    return checked(PromptText(text.replace("\r\n", "\n")), name)


def folder_refused(name: str, endings: Sequence[str] = SUFFIXES) -> BadPrompt:
    """Return the refusal of a folder where a file is expected. endings: of the files that are taken."""
    *most, last = endings
    sentence = f"'{name}' is a folder: name a file in it that ends with {', '.join(most)} or {last}."
    return BadPrompt(sentence, code="prompt_is_folder", folder=name)


def read_prompt(path: Path) -> PromptText:
    """Return the checked prompt of a file. Raises BadPrompt with one sentence, also where there is no such file and
    where it is a folder."""
    if path.is_dir():
        raise folder_refused(str(path))
    if not path.is_file():
        raise BadPrompt(f"there is no prompt file '{path}'.")
    try:
        return checked(decode(read_bounded(path, MAX_BYTES), path.name), str(path))
    except RefusedFile as error:
        raise BadPrompt(str(error)) from None


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
    prefix, question = data.get("answer_prefix"), data.get("question")
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = str(answer)
    alternatives = data.get("answers")
    text = data["text"]
    plain, named = text.replace("\r\n", "\n"), data.get("segments") or {}
    if not isinstance(named, dict):
        raise BadPrompt(f'{name}: "segments" must be an object of names with a marker or [start, end].')
    pairs = [(part, _segment_place(text, place, name)) for part, place in named.items()]
    return checked(
        PromptText(
            plain,
            answer if isinstance(answer, str) else None,
            tuple((_without_cr(text, start), _without_cr(text, end)) for start, end in needle),
            task if isinstance(task, str) else None,
            seed if isinstance(seed, int) and 0 <= seed < 1 << 63 else None,
            prefix if isinstance(prefix, str) else "",
            _without_cr(text, question) if isinstance(question, int) and not isinstance(question, bool) else None,
            tuple(item for item in alternatives if isinstance(item, str)) if isinstance(alternatives, list) else (),
            find_segments(pairs, plain),
        ),
        name,
    )


def _segment_place(text: str, place: object, name: str) -> str | tuple[int, int]:
    """Return the marker or the character range of a segment, in the text with LF for CRLF. Raises BadPrompt."""
    if isinstance(place, str):
        return place.replace("\r\n", "\n")
    if isinstance(place, list) and [type(index) for index in place] == [int, int]:
        return _without_cr(text, place[0]), _without_cr(text, place[1])
    raise BadPrompt(f'{name}: "segments" must be an object of names with a marker or [start, end].')


def _without_cr(text: str, index: int) -> int:
    """Return where the character at `index` of the text is once each CRLF of the text is LF. An index outside the text
    stays outside."""
    return index - text[: max(index, 0) + 1].count("\r\n")
