"""Tasks that are read from a file the user has on disk: one JSON object a line, checked before anything is run."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlens.tasks.base import Asked, Encode, Task

KINDS = {str: "a text", list: "a list", int: "a number", dict: "an object"}


class FileTask(Task):
    """The prompts of one file in order; `index` names one. A prompt is as long as its text, or cut in its middle to
    `length` tokens, as LongBench and InfiniteBench cut: what stands at the beginning and at the end is kept."""

    placed = False
    fields: Mapping[str, type]
    """fields every line must have, with their types"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name, self.title = path.stem, path.stem
        self.lines = read_lines(path, self.fields)
        self.items = len(self.lines)
        for number, line in self.lines:
            self.check(number, line)

    def check(self, number: int, line: dict[str, Any]) -> None:
        """Raises ValueError, naming line and field, for a line that cannot be asked or scored."""

    @abstractmethod
    def ask(self, line: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        """(prompt, answers, what else the metric needs) of a line."""

    @abstractmethod
    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        """0..1"""

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> Asked:
        if not 0 <= index < len(self.lines):
            raise ValueError(f"'{self.path.name}' has {len(self.lines)} prompts; there is no number {index}.")
        text, answers, facts = self.ask(self.lines[index][1])
        if length is not None:
            text = cut_middle(text, length - special, encode)
        return Asked(text, " " + answers[0], (), self.name, length, None, seed, index, answers, facts)

    def score(self, answer: str, output: str) -> float:
        return self.measure(output, (answer.strip(),), {})

    def grade(self, asked: Asked, output: str) -> float:
        return self.measure(output, asked.answers, asked.facts)

    def wrong(self, number: int, problem: str) -> ValueError:
        """The error of a line."""
        return ValueError(f"line {number} of '{self.path.name}' {problem}.")


def read_lines(path: Path, fields: Mapping[str, type]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not empty. Raises ValueError with one sentence naming line and
    field."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path.name}' is not UTF-8 text (byte {error.start:,} cannot be decoded).") from None
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}.") from None
    found = []
    for number, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except ValueError:
            raise ValueError(f"line {number} of '{path.name}' is not JSON.") from None
        if not isinstance(line, dict):
            raise ValueError(f"line {number} of '{path.name}' is not a JSON object.")
        for name, kind in fields.items():
            if name not in line:
                raise ValueError(f"line {number} of '{path.name}' lacks the field '{name}'.")
            if not isinstance(line[name], kind):
                raise ValueError(f"line {number} of '{path.name}': the field '{name}' is not {KINDS[kind]}.")
        found.append((number, line))
    if not found:
        raise ValueError(f"'{path.name}' holds no prompts.")
    return found


def texts(values: list[Any]) -> tuple[str, ...]:
    """Numbers and strings of a list as strings."""
    return tuple(str(value) for value in values)


def cut_middle(text: str, tokens: int, encode: Encode) -> str:
    """`text` without as much of its middle as brings it to at most `tokens` tokens."""
    if len(encode(text)) <= tokens:
        return text
    low, high = 0, len(text)
    while low < high:
        kept = (low + high + 1) // 2
        if len(encode(_ends(text, kept))) <= tokens:
            low = kept
        else:
            high = kept - 1
    return _ends(text, low)


def _ends(text: str, kept: int) -> str:
    return text[: kept - kept // 2] + (text[-(kept // 2) :] if kept > 1 else "")
