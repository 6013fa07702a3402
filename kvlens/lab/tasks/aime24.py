r"""AIME 2024 files (30 problems, answers from 000 to 999), one JSON object a line, or Parquet.

Fields (problem, answer as a number or its digits) are those of the data set HuggingFaceH4/aime_2024; the problems are
the Mathematical Association of America's. An output is right when the last \boxed{} of it whose braces match holds the
number; `@samples=K` is avg@K (kvlens/lab/tasks/reasoning.py), the usual figure for so few problems. The prompt is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks.filetask import Posed
from kvlens.lab.tasks.reasoning import BOXED, Reasoning, last_boxed

_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")


class Aime24(Reasoning):
    """Problems whose answers are whole numbers."""

    fields: Mapping[str, type] = {"problem": str}
    parameters: ClassVar[Mapping[str, int | str]] = {"tokens": 4096, "samples": 1}

    def __init__(self, path: Path, tokens: int | None = None, samples: int = 1) -> None:
        super().__init__(path, tokens, samples)
        self.summary = "AIME 2024"
        self.metric = self.averaged("exact match of the number in the last \\boxed{}")

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not line["problem"].strip():
            raise self.wrong(number, "has an empty field 'problem'")
        if "answer" not in line:
            raise self.wrong(number, "lacks the field 'answer'", "field_missing", field="answer")
        answer = line["answer"]
        if isinstance(answer, bool) or not re.fullmatch(r"[0-9]{1,3}", str(answer).strip()):
            raise self.wrong(number, f"has the answer '{str(answer)[:20]}', which is no number from 000 to 999")

    def ask(self, line: dict[str, Any]) -> Posed:
        return Posed(f"{line['problem'].strip()}\n\n{BOXED}", (str(int(line["answer"])),))

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        sentence = _WRAPPED.sub(r"\1", last_boxed(output) or "").strip(" $.")
        return float(re.fullmatch(r"[0-9]{1,3}", sentence) is not None and int(sentence) == int(answers[0]))
