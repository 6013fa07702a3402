"""InfiniteBench as kvpress stores it (the data set MaxJeblick/InfiniteBench): one file per task, or all of them.

The columns are those of kvlens.lab.tasks.pressrows, the answers in `answer`. Of a multiple choice the answer is the
letter alone, and the options end the question, a line each (A. to D.); the metric compares with the option's text too.
Metrics are InfiniteBench's (kvlens.lab.tasks.infinitebench), which kvpress's evaluation/benchmarks/infinite_bench/
calculate_metrics.py uses as well. math_calc asks for 30,020 tokens; at most MOST_TOKENS are generated here, so its
score is a lower bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvlens.lab.tasks.infinitebench import CHOICES, LETTERS, TASKS
from kvlens.lab.tasks.pressrows import MOST_TOKENS, PressRows

_OPTIONS = re.compile("".join(rf"\n{letter}\. (.*)" for letter in LETTERS) + r"\s*\Z")


class InfiniteBenchRows(PressRows):
    """Tasks of InfiniteBench, mixed or one of them."""

    benchmark = "InfiniteBench"
    metric = "InfiniteBench's, of the row's task"

    def tokens(self, line: dict[str, Any]) -> int:
        wanted_tokens = int(line["max_new_tokens"])
        return min(wanted_tokens, MOST_TOKENS) if line["task"] == "math_calc" else wanted_tokens

    def check(self, number: int, line: dict[str, Any]) -> None:
        super().check(number, line)
        if line["task"] not in TASKS:
            raise self.wrong(number, f"has the task '{line['task'][:40]}', which InfiniteBench does not have")
        if line["task"] in CHOICES:
            if line["answer"][0] not in tuple(LETTERS):
                raise self.wrong(number, "has an answer that is no letter from A to D")
            if _OPTIONS.search(line["question"]) is None:
                raise self.wrong(number, "has a question that does not end in the options A to D")

    def answers_of(self, line: dict[str, Any]) -> tuple[str, ...]:
        options = _OPTIONS.search(line["question"]) if line["task"] in CHOICES else None
        if options is None:
            return super().answers_of(line)
        letter = line["answer"][0]
        return options.group(1 + LETTERS.index(letter)), letter

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        grader, _, _ = TASKS[facts.get("task") or self.lines[0][1]["task"]]
        return grader(output, answers)
