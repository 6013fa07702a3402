"""MATH-500 files (test.jsonl, 500 problems of Hendrycks et al.'s MATH).

Fields (problem, answer, subject, level) are those of the data set HuggingFaceH4/MATH-500, after
github.com/openai/prm800k, prm800k/math_splits. Whether an answer is right is asked of the package math-verify
(github.com/huggingface/Math-Verify), which takes the last boxed expression, or what is announced as the answer; without
it the file is refused. The prompt is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlens.lab.tasks import mathverify
from kvlens.lab.tasks.filetask import Posed
from kvlens.lab.tasks.reasoning import BOXED, Reasoning


class Math500(Reasoning):
    """Problems whose answers are expressions."""

    fields: Mapping[str, type] = {"problem": str, "answer": str, "subject": str, "level": int}

    def __init__(self, path: Path, tokens: int | None = None, samples: int = 1) -> None:
        mathverify.package()  # says now, not after the first run, what is missing
        super().__init__(path, tokens, samples)
        self.summary = "MATH-500"
        self.metric = self.averaged("equality by math-verify")

    def check(self, number: int, line: dict[str, Any]) -> None:
        for name in ("problem", "answer"):
            if not line[name].strip():
                raise self.wrong(number, f"has an empty field '{name}'")

    def ask(self, line: dict[str, Any]) -> Posed:
        return Posed(f"{line['problem'].strip()}\n\n{BOXED}", (line["answer"].strip(),))

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        return float(mathverify.equal(answers[0], output))
