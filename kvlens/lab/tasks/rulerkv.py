"""RULER as kvpress stores it: one Parquet file per length with rows of all thirteen tasks.

Columns (context, question, answer_prefix, answer, task, max_new_tokens) are those of the data set simonjegou/ruler that
github.com/NVIDIA/kvpress reads, evaluation/benchmarks/ruler; metrics are those of its calculate_metrics.py, which are
RULER's own: string_match_part for tasks whose name begins with qa, string_match_all for the others, control characters
of the output dropped. Tokens to generate are the row's. context, question and answer_prefix follow one another as they
stand, with a new line or a space between two that have none; in the chat form the prefix begins the answer, as kvpress
has it.

The rows of a task stand together, so that the first ones are of one task: `rulerkv:PATH@task=vt` takes those of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks import metrics
from kvlens.lab.tasks.filetask import FileTask, Posed, texts
from kvlens.tasks.base import Generation

MOST_TOKENS = 4096
"""to generate, that a row may ask for; RULER's own go up to 128"""
_CONTROL = re.compile(r"[\x00-\x1f]")


class RulerRows(FileTask):
    """Tasks of RULER, mixed or one of them."""

    fields: Mapping[str, type] = {
        "context": str,
        "question": str,
        "answer_prefix": str,
        "answer": list,
        "task": str,
        "max_new_tokens": int,
    }
    parameters: ClassVar[Mapping[str, int | str]] = {"task": ""}
    metric = "RULER's string_match_all, for qa string_match_part"

    def __init__(self, path: Path, task: str = "") -> None:
        super().__init__(path)
        task_names = list(dict.fromkeys(line["task"] for _, line in self.lines))
        if task and task not in task_names:
            raise ValueError(f"'{path.name}' has no rows of the task '{task}'; it has {', '.join(task_names)}.")
        self.lines = [(number, line) for number, line in self.lines if task in ("", line["task"])]
        self.items = len(self.lines)
        self.new_tokens = max(line["max_new_tokens"] for _, line in self.lines)
        self.summary = f"RULER as kvpress stores it, {task or f'{len(task_names)} tasks'}"

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not line["answer"] or not all(isinstance(part, str) and part for part in line["answer"]):
            raise self.wrong(number, "has a field 'answer' that is not a list of texts")
        if not line["context"].strip() or not line["question"].strip():
            raise self.wrong(number, "has an empty context or question")
        if not 1 <= line["max_new_tokens"] <= MOST_TOKENS:
            raise self.wrong(number, f"has a field 'max_new_tokens' outside 1 to {MOST_TOKENS:,}")

    def generation(self, index: int = 0) -> Generation:
        return Generation(self.lines[index][1]["max_new_tokens"])

    def ask(self, line: dict[str, Any]) -> Posed:
        prefix = _joint(line["question"], " ", line["answer_prefix"])
        question = _joint(line["context"], "\n", line["question"])
        facts = {"part": line["task"].startswith("qa")}
        return Posed(line["context"], texts(line["answer"]), facts, question + prefix, prefix, prefix.strip())

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        metric = metrics.string_match_part if facts.get("part") else metrics.string_match_all
        return metric(_CONTROL.sub("", output.strip()), answers)


def _joint(head: str, between: str, text: str) -> str:
    """`text` behind `head`, apart from it."""
    return text if not text or text[0].isspace() or head[-1].isspace() else between + text
