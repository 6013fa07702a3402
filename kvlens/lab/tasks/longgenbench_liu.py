"""LongGenBench of Liu et al. (arXiv 2410.04199, EMNLP 2024 Findings): K questions in one prompt, all of which are to be
answered in one output. Another benchmark of the same name: longgenbench_wu.py.

Its questions are those of GSM8K (.jsonl with question and answer) and MMLU (.csv without a header: question, four
choices, letter); how they are put behind each other ('Question_9:'), how an output is cut into answers ('Answer_', then
what follows a colon at the end of a line, up to an empty line; the n-th is the n-th question's) and how one is read
(its last number; its last capital A to D) are taken from github.com/Dominic789654/LongGenBench,
longgenbench_GSM8K_openai.py and longgenbench_MMLU_openai.py. Ours: a score is the share of all K questions, where the
official one leaves those without an answer out (GSM8K) or asks them again (MMLU); commas of numbers are dropped on both
sides; the answers' form is said in words of ours, and the worked examples before the questions are the repository's own
LongGenBench_prompt.txt where that lies beside a GSM8K file, else the rows behind the asked ones.

`@questions=K`: questions per prompt (what is left over at the end of a file is not asked); `@shots=N`: worked examples;
`@tokens=N`: tokens to generate at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks.filerows import Rows, read_rows, read_table, read_text
from kvlens.lab.tasks.filetask import FileTask, Posed
from kvlens.lab.tasks.gsm8k import final
from kvlens.lab.tasks.reasoning import MOST_TOKENS
from kvlens.refusal import Refusal

EXAMPLES = "LongGenBench_prompt.txt"
LETTERS = "ABCD"
FORM = (
    "Answer every question, step by step and in the form of the examples: begin each answer with 'Answer_', its number "
    "and a colon on a line of their own, and end it with 'The answer is' and the answer. Do not repeat the questions."
)
SEPARATOR = ", "
"""between the answers to a prompt's questions"""


class LongGenBenchLiu(FileTask):
    """Several questions at once."""

    fields: Mapping[str, type] = {"question": str, "answer": str}
    parameters: ClassVar[Mapping[str, int | str]] = {"questions": 4, "shots": 8, "tokens": 4096}

    def __init__(self, path: Path, questions: int = 4, shots: int = 8, tokens: int = 4096) -> None:
        if questions < 2:
            raise Refusal(
                f"the parameter 'questions' is at least 2, not {questions}.",
                code="parameter_out_of_range",
                parameter="questions",
                value=questions,
            )
        if not 1 <= tokens <= MOST_TOKENS:
            raise Refusal(
                f"the parameter 'tokens' lies between 1 and {MOST_TOKENS:,}, not {tokens:,}.",
                code="parameter_out_of_range",
                parameter="tokens",
                value=tokens,
            )
        self.choices = path.suffix.lower() == ".csv"
        super().__init__(path)
        beside = path.parent / EXAMPLES
        self._worked = read_text(beside).strip() if not self.choices and beside.is_file() else None
        self._first = len(re.findall(r"^Question_\d+:", self._worked, re.MULTILINE)) if self._worked else shots
        if self._worked is not None and not self._first:
            raise ValueError(f"'{EXAMPLES}' beside '{path.name}' holds no 'Question_1:'.")
        self.questions, self.shots, self.new_tokens = questions, shots, tokens
        self.items = len(self.lines) // questions
        needed = questions if self._worked is not None else questions + shots
        if len(self.lines) < needed:
            raise Refusal(
                f"'{path.name}' has {len(self.lines)} rows, too few for {questions} questions and {needed - questions} "
                "worked examples: set @questions and @shots.",
                code="too_few_rows",
                rows=len(self.lines),
            )
        total = "MMLU" if self.choices else "GSM8K"
        self.summary = f"LongGenBench of Liu et al. (2410.04199), {questions} questions of {total} at once"
        self.metric = f"share of the questions with the right last {'letter' if self.choices else 'number'}"

    def read(self) -> tuple[str, Rows]:
        """A choice's question is made of its columns."""
        return _choices(self.path) if self.choices else read_rows(self.path, self.fields)

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not line["question"].strip():
            raise self.wrong(number, "has an empty question")
        if not self.choices and final(line["answer"]) is None:
            raise self.wrong(number, "has an answer that does not end with #### and a number")

    def pose(self, index: int) -> Posed:
        start = index * self.questions
        return self._posed([line for _, line in self.lines[start : start + self.questions]], start + self.questions)

    def ask(self, line: dict[str, Any]) -> Posed:
        return self._posed([line], 0)

    def _posed(self, request: Sequence[Mapping[str, Any]], behind: int) -> Posed:
        """behind: the row from which on worked examples are taken, from the first again where the rows end."""
        worked = self._worked
        if worked is None:
            rows = [self.lines[(behind + step) % len(self.lines)][1] for step in range(self.shots)]
            worked = "\n\n".join(
                [*(f"Question_{index}:\n{row['question'].strip()}" for index, row in enumerate(rows, 1))]
                + [f"Answer_{index}:\n{self._solution(row)}" for index, row in enumerate(rows, 1)]
            )
        questions = "\n\n".join(
            f"Question_{index}:\n{line['question'].strip()}" for index, line in enumerate(request, self._first + 1)
        )
        context = f"{FORM}\n\nExamples:\n{worked}" if worked else FORM
        answers = SEPARATOR.join(self._right(line) for line in request)
        return Posed(context, (answers,), question=f"\n\nFollowing questions:\n{questions}\n\n", cue="")

    def _right(self, line: Mapping[str, Any]) -> str:
        return line["answer"] if self.choices else f"{final(line['answer']):f}"

    def _solution(self, line: Mapping[str, Any]) -> str:
        steps = "" if self.choices else line["answer"].partition("####")[0].strip() + "\n"
        return f"{steps}The answer is {self._right(line)}."

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        target, source = answers[0].split(SEPARATOR), split_answers(output)
        pattern = r"[ABCD]" if self.choices else r"\d*\.?\d+"
        right = 0
        for answer, text in zip(target, source, strict=False):
            pieces = re.findall(pattern, text.replace(",", ""))
            right += bool(pieces) and pieces[-1] == answer.lstrip("-")
        return right / len(target)


def split_answers(output: str) -> list[str]:
    """The answers of an output in their order."""
    pieces = "\n".join(output.split("Answer_"))
    return [results.strip() for results in re.findall(r"(?<=:\n)(.*?)(?=\n\n|$)", pieces, re.DOTALL)]


def _choices(path: Path) -> tuple[str, Rows]:
    """Questions of an MMLU file with their choices. Raises ValueError with one sentence."""
    rows: Rows = []
    for number, row in enumerate(read_table(path), 1):
        if len(row) != 2 + len(LETTERS):
            raise ValueError(
                f"row {number} of '{path.name}' has {len(row)} columns, not question, four choices, letter."
            )
        question, *choices, right = row
        if not question.strip():
            raise ValueError(f"row {number} of '{path.name}' has an empty question.")
        if right not in set(LETTERS):
            raise ValueError(
                f"row {number} of '{path.name}' has the answer '{right[:20]}', which is none of A, B, C, D."
            )
        listed = " ".join(f"({letter}) {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=True))
        rows.append((number, {"question": f"{question.strip()}\n{listed}", "answer": right}))
    if not rows:
        raise ValueError(f"'{path.name}' holds no prompts.")
    return "row", rows
