"""GPQA files (gpqa_diamond.csv and its sisters, as published: a CSV of questions with one right and three wrong
answers).

Columns (Question, Correct Answer, Incorrect Answer 1 to 3) and how the letter is read off an output are taken from
github.com/idavidrein/gpqa, baselines/utils.py and run_baseline.py: 'answer is (B)', 'Answer: (B)', 'answer: (B)',
'answer (B)', else the first letter in brackets. The four answers are shuffled by a seed of their own for every row,
`@shuffle=N` takes another (the official shuffle is one stream over all rows). Metric: accuracy of the letter. The
prompt is ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks.filetask import Posed
from kvlens.lab.tasks.reasoning import Reasoning

LETTERS = "ABCD"
CHOICES = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
_SAID = tuple(
    re.compile(pattern)
    for pattern in (r"answer is \((.)\)", r"Answer: \((.)\)", r"answer: \((.)\)", r"answer \((.)\)", r"\((.)\)")
)


class Gpqa(Reasoning):
    """Multiple choice."""

    fields: Mapping[str, type] = {"Question": str, **dict.fromkeys(CHOICES, str)}
    parameters: ClassVar[Mapping[str, int | str]] = {"tokens": 2048, "samples": 1, "shuffle": 0}

    def __init__(self, path: Path, tokens: int | None = None, samples: int = 1, shuffle: int = 0) -> None:
        super().__init__(path, tokens, samples)
        self.shuffle = shuffle
        self.summary = f"GPQA, {self.stem}"
        self.metric = self.averaged("accuracy of the letter (GPQA's)")

    def check(self, number: int, line: dict[str, Any]) -> None:
        for name in self.fields:
            if not line[name].strip():
                raise self.wrong(number, f"has an empty column '{name}'")
        if len({line[name].strip() for name in CHOICES}) < len(CHOICES):
            raise self.wrong(number, "has an answer twice, so that no letter is the right one")

    def pose(self, index: int) -> Posed:
        number, line = self.lines[index // self.samples]
        sentences = [line[name].strip() for name in CHOICES]
        right = sentences[0]
        random.Random(f"gpqa/{self.shuffle}/{number}").shuffle(sentences)
        return _posed(line["Question"], sentences, right)

    def ask(self, line: dict[str, Any]) -> Posed:
        return _posed(line["Question"], [line[name].strip() for name in CHOICES], line[CHOICES[0]].strip())

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        return float(letter(output) in answers)


def _posed(question: str, texts: list[str], right: str) -> Posed:
    choices = "\n".join(f"({letter}) {text}" for letter, text in zip(LETTERS, texts, strict=True))
    form = 'Think step by step, and end with "The correct answer is (letter)".'
    return Posed(f"{question.strip()}\n\n{choices}\n\n{form}", (LETTERS[texts.index(right)],))


def letter(output: str) -> str | None:
    """The letter that an output names, None when it names none: the first match of each form in turn."""
    for pattern in _SAID:
        match = pattern.search(output)
        if match and match.group(1) in LETTERS:
            return match.group(1)
    return None
