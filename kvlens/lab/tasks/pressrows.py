"""Rows of benchmarks as kvpress stores them on the Hugging Face Hub: Parquet, or a JSON object a line.

Columns (context, question, answer_prefix, task, max_new_tokens, and the answers) are those that
github.com/NVIDIA/kvpress reads, evaluation/evaluate.py and evaluation/benchmarks/*/create_huggingface_dataset.py. The
instructions of a benchmark are part of the columns. Tokens to generate are the row's. context, question and
answer_prefix follow one another as they stand, with a new line or a space between two that have none; in the chat form
the prefix begins the answer, as kvpress has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks.filetask import FileTask, Posed, texts
from kvlens.refusal import Refusal
from kvlens.tasks.base import Generation

MOST_TOKENS = 4096
"""to generate, that a row may ask for; RULER's own go up to 128"""
OWN = ("answer_prefix", "max_new_tokens")
"""columns that no benchmark has in its authors' form"""


def refuse_press_rows(path: Path, kind: str) -> None:
    """Raises ValueError that names the right kind, if a Parquet file holds a benchmark as kvpress stores it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix.lower() != ".parquet":
        return
    try:
        columns = pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return  # the reader of rows says what is wrong
    if all(name in columns for name in OWN):
        raise ValueError(f"'{path.name}' is in the form in which kvpress stores it: name it {kind}kv:{path}.")


class PressRows(FileTask):
    """Tasks of one benchmark, mixed or one of them."""

    benchmark: ClassVar[str]
    """name of the benchmark"""
    answers: ClassVar[str] = "answer"
    """column of the list of answers"""
    parameters: ClassVar[Mapping[str, int | str]] = {"task": ""}

    def __init__(self, path: Path, task: str = "") -> None:
        self.fields = {
            "context": str,
            "question": str,
            "answer_prefix": str,
            self.answers: list,
            "task": str,
            "max_new_tokens": int,
        }
        super().__init__(path)
        task_names = list(dict.fromkeys(line["task"] for _, line in self.lines))
        if task and task not in task_names:
            raise Refusal(
                f"'{path.name}' has no rows of the task '{task}'; it has {', '.join(task_names)}.",
                code="no_such_task",
                task=task,
                tasks=task_names,
            )
        self.lines = [(number, line) for number, line in self.lines if task in ("", line["task"])]
        self.items = len(self.lines)
        self.new_tokens = max(self.tokens(line) for _, line in self.lines)
        self.summary = f"{self.benchmark} as kvpress stores it, {task or f'{len(task_names)} tasks'}"

    def tokens(self, line: dict[str, Any]) -> int:
        """Return the number of tokens to generate for a row."""
        return int(line["max_new_tokens"])

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not line[self.answers] or not all(isinstance(part, str) and part for part in line[self.answers]):
            raise self.wrong(number, f"has a field '{self.answers}' that is not a list of texts")
        if not line["context"].strip():
            raise self.wrong(number, "has an empty context")
        if not 1 <= self.tokens(line) <= MOST_TOKENS:
            raise self.wrong(number, f"has a field 'max_new_tokens' outside 1 to {MOST_TOKENS:,}")

    def generation(self, index: int = 0) -> Generation:
        return Generation(self.tokens(self.lines[index][1]))

    def answers_of(self, line: dict[str, Any]) -> tuple[str, ...]:
        """Return the answers of a row as the metric compares them."""
        return texts(line[self.answers])

    def facts_of(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return what the metric needs beside the answers."""
        return {"task": line["task"]}

    def ask(self, line: dict[str, Any]) -> Posed:
        question = _joint(line["context"], "\n", line["question"])
        prefix = _joint(question or line["context"], " ", line["answer_prefix"])
        return Posed(
            line["context"], self.answers_of(line), self.facts_of(line), question + prefix, prefix, prefix.strip()
        )


def _joint(head: str, between: str, text: str) -> str:
    """Return `text` behind `head`, apart from it."""
    return text if not text or text[0].isspace() or head[-1].isspace() else between + text
