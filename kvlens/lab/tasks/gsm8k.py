"""GSM8K files (test.jsonl, train.jsonl), many-shot: worked examples before each question.

Fields (question, and answer, whose last line is '#### ' and the number) and the rule that reads the number behind the
first #### of an output are taken from github.com/openai/grade-school-math, grade_school_math/dataset.py; numbers are
compared by value, so that 18.00 is 18. `@shots=N` says how many worked examples stand before the question: the first N
of a train.jsonl beside the file, or, where there is none or the file is it, the N rows that follow the asked one. With
a train.jsonl all questions have the same context, which `--question after` reads once. `@tokens`, `@samples`:
kvlens/lab/tasks/reasoning.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks.filerows import read_rows
from kvlens.lab.tasks.filetask import Posed
from kvlens.lab.tasks.reasoning import Reasoning
from kvlens.refusal import Refusal

TRAIN = "train.jsonl"
HEAD = "Answer each question step by step, and end with #### and the number.\n\n"
CUE = "\nAnswer:"
_FINAL = re.compile(r"####\s*\$?(-?[0-9.,]+)")


class Gsm8k(Reasoning):
    """Word problems whose answers are numbers."""

    fields: Mapping[str, type] = {"question": str, "answer": str}
    parameters: ClassVar[Mapping[str, int | str]] = {"shots": 8, "tokens": 256, "samples": 1}

    def __init__(self, path: Path, tokens: int | None = None, samples: int = 1, shots: int = 8) -> None:
        super().__init__(path, tokens, samples)
        train = path.parent / TRAIN
        self._examples = read_examples(train, self.fields, shots) if path.name != TRAIN and train.is_file() else None
        if self._examples is None and shots >= len(self.lines):
            raise Refusal(
                f"'{path.name}' has {len(self.lines)} rows, too few for {shots} worked examples from its other rows; "
                f"put {TRAIN} beside it or set @shots.",
                code="too_few_rows",
                rows=len(self.lines),
                needed=shots,
            )
        self.shots = shots
        self.summary = f"GSM8K with {shots} worked examples"
        self.metric = self.averaged("exact match of the number behind ####")

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not line["question"].strip():
            raise self.wrong(number, "has an empty field 'question'")
        if final(line["answer"]) is None:
            raise self.wrong(number, "has an answer that does not end with #### and a number", code="no_figure")

    def pose(self, index: int) -> Posed:
        position = index // self.samples
        rest = self._examples or [
            self.lines[(position + step) % len(self.lines)][1] for step in range(1, self.shots + 1)
        ]
        worked = "\n\n".join(f"{_write_question(line)} {line['answer'].strip()}" for line in rest[: self.shots])
        line = self.lines[position][1]
        context, request = HEAD + worked, ("\n\n" if worked else "") + _write_question(line)
        return Posed(context, (f"{final(line['answer']):f}",), question=request, cue=CUE)

    def ask(self, line: dict[str, Any]) -> Posed:
        return Posed(HEAD, (f"{final(line['answer']):f}",), question=_write_question(line), cue=CUE)

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        source = final(output)
        return float(source is not None and source == Decimal(answers[0]))


def read_examples(path: Path, fields: Mapping[str, type], count: int) -> list[dict[str, Any]]:
    """The first `count` worked examples of a file. Raises ValueError with one sentence for one that is none, or where
    there are fewer."""
    unit, rows = read_rows(path, fields)
    if len(rows) < count:
        raise ValueError(f"'{path.name}' has {len(rows)} worked examples, not {count}.")
    for number, row in rows[:count]:
        if final(row["answer"]) is None:
            raise Refusal(
                f"{unit} {number} of '{path.name}' has an answer that does not end with #### and a number.",
                code="no_figure",
                row=number,
            )
    return [row for _, row in rows[:count]]


def final(text: str) -> Decimal | None:
    """The number behind the first #### of a text; None where there is none."""
    match = _FINAL.search(text)
    try:
        return Decimal(match.group(1).replace(",", "").rstrip(".")) if match else None
    except InvalidOperation:
        return None


def _write_question(line: Mapping[str, Any]) -> str:
    return f"Question: {line['question'].strip()}{CUE}"
