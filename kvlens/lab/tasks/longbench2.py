"""LongBench v2 files (data.jsonl, 503 multiple-choice questions).

Fields (_id, domain, sub_domain, difficulty, length, question, choice_A to choice_D, answer, context), the 128 tokens to
generate and the rule that reads the letter behind 'The correct answer is' are taken from github.com/THUDM/LongBench:
README.md, pred.py (extract_answer) and result.py (accuracy). The official prompt asks for that very sentence; ours asks
for it too, in other words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlens.lab.tasks import metrics
from kvlens.lab.tasks.filetask import FileTask, Posed

LETTERS = "ABCD"


class LongBench2(FileTask):
    """Multiple choice."""

    fields: Mapping[str, type] = {
        "context": str,
        "question": str,
        "answer": str,
        **{f"choice_{letter}": str for letter in LETTERS},
    }
    new_tokens = 128
    summary = "LongBench v2, multiple choice"
    metric = "LongBench v2's accuracy: the letter behind 'The correct answer is'"

    def check(self, number: int, line: dict[str, Any]) -> None:
        if line["answer"] not in set(LETTERS):
            raise self.wrong(number, f"has the answer '{line['answer'][:20]}', which is none of A, B, C, D")

    def ask(self, line: dict[str, Any]) -> Posed:
        choices = "\n".join(f"({letter}) {line[f'choice_{letter}'].strip()}" for letter in LETTERS)
        text = (
            f"Read this text, then answer the question below it.\n\n{line['context'].strip()}\n\nQuestion: "
            f"{line['question'].strip()}\n"
            f'{choices}\n\nAnswer in the form "The correct answer is (letter)".'
        )
        return Posed(text, (line["answer"],))

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        return float(metrics.choice(output) in answers)
