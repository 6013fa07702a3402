"""Needle in a haystack on the user's own texts: a folder of .txt files, such as the essays of the original test, or one
such file.

The original (github.com/gkamradt/LLMTest_NeedleInAHaystack) publishes no prompts, only texts, a needle and a question
(needlehaystack/run.py); it puts the needle behind a full stop at a share of the text. Its metric is another model's
opinion from 1 to 10, which cannot be had here: an output is scored by RULER's string_match_all over key phrases, which
is ours. needle.json beside the texts replaces needle, question and phrases: {"needle": "...", "question": "...",
"answers": ["...", ...]}.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from kvlens.tasks.base import Encode, Task, TaskPrompt, check_place
from kvlens.tasks.generated import SEPARATOR, string_match_all
from kvlens.tasks.layout import Content, compose

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "What is the best thing to do in San Francisco?"
PHRASES = ("eat a sandwich", "Dolores Park", "sunny day")


class Haystack(Task):
    """The needle at the wanted depth of the user's texts, in their order from a place drawn by the seed, from the
    beginning again when they end."""

    new_tokens = 64
    metric = "share of the key phrases that the output contains (ours, in place of a judging model)"

    def __init__(self, path: Path) -> None:
        self.name = self.title = path.stem
        self.summary = "needle in a haystack on your own texts"
        folder = path if path.is_dir() else path.parent
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        self.sentences = [sentence for file in files for sentence in _sentences(file)]
        if not self.sentences:
            raise ValueError(f"'{path.name}' holds no sentences: give a .txt file or a folder of them.")
        self.needle, self.question, self.phrases = _read_needle(folder / "needle.json")

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        tokens, place = check_place(self.name, length, depth)
        rng = random.Random(f"haystack/{seed}")
        content = Content([self.needle], [place], tail=f"\n\nQuestion: {self.question} Answer:")
        text, ranges = compose("haystack", content, tokens, rng, encode, special, self.sentences)
        expected, behind = " " + SEPARATOR.join(self.phrases), len(text) - len(content.tail)
        return TaskPrompt(text, expected, ranges, self.name, tokens, place, seed, index, self.phrases, question=behind)

    def score(self, answer: str, output: str) -> float:
        return string_match_all(output, answer.strip().split(SEPARATOR))

    def grade(self, asked: TaskPrompt, output: str) -> float:
        return string_match_all(output, asked.answers)


def _sentences(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{file.name}' is not UTF-8 text (byte {error.start:,} cannot be decoded).") from None
    except OSError as error:
        raise ValueError(f"'{file}' cannot be read: {error.strerror}.") from None
    return [part for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part]


def _read_needle(path: Path) -> tuple[str, str, tuple[str, ...]]:
    """(needle, question, key phrases) of needle.json, or the original's. Raises ValueError naming the field that is
    missing."""
    if not path.is_file():
        return NEEDLE, QUESTION, PHRASES
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"'{path.name}' is not JSON.") from None
    for field, kind in (("needle", str), ("question", str), ("answers", list)):
        if not isinstance(data, dict) or not isinstance(data.get(field), kind) or not data[field]:
            raise ValueError(f"'{path.name}' lacks the field '{field}'.")
    return data["needle"], data["question"], tuple(str(phrase) for phrase in data["answers"])
