"""InfiniteBench files (one task a file: passkey.jsonl, kv_retrieval.jsonl, ...).

File names, fields (id, context, input, answer, options), tokens to generate and metrics are taken from
github.com/OpenBMB/InfiniteBench: README.md, src/eval_utils.py and src/compute_scores.py; how the letter of a multiple
choice is found (the option that equals the answer) from later copies of eval_utils.get_answer. The instructions around
a text are ours: figures can be compared between methods, not with published ones. math_calc asks for tens of thousands
of tokens; 1,024 are generated here, so its score is a lower bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlens.lab.tasks import infinite_metrics as metrics
from kvlens.lab.tasks.filerows import unpacked
from kvlens.lab.tasks.filetask import FileTask, Posed, texts
from kvlens.lab.tasks.pressrows import refuse_press_rows
from kvlens.refusal import Refusal

TASKS: dict[str, tuple[Callable[[str, Sequence[str]], float], int, str]] = {
    "passkey": (metrics.first_number, 6, "{input}\nThe pass key is"),
    "number_string": (metrics.first_number, 12, "{input}\nThe digits are"),
    "kv_retrieval": (metrics.key_value, 50, "{input}\nAnswer:"),
    "longbook_sum_eng": (metrics.rouge_lsum, 1200, "Summarize this book.\nSummary:"),
    "longbook_choice_eng": (metrics.choice, 40, "Question: {input}\n{options}\nThe letter of the right answer is"),
    "longbook_qa_eng": (metrics.question, 40, "Question: {input}\nA short answer:"),
    "longbook_qa_chn": (metrics.question_zh, 40, "问题：{input}\n答案："),
    "longdialogue_qa_eng": (metrics.dialogue, 40, "One name in this dialogue was replaced by $$MASK$$. The name is"),
    "math_find": (metrics.find_number, 3, "{input}\nAnswer:"),
    "math_calc": (metrics.calculation, 1024, "The intermediate values of this expression from left to right:"),
    "code_run": (metrics.code_run, 5, "{input}\nThe value of {call} is"),
    "code_debug": (metrics.code_debug, 5, "Which function has a deliberate error?\n{options}\nThe correct option is:"),
}
"""file name -> (metric, tokens to generate, what is asked behind the text)"""
CHOICES = frozenset(("longbook_choice_eng", "code_debug"))
LETTERS = "ABCD"
_CALL = re.compile(r"func_\d+\(-?\d+\)")


class InfiniteBench(FileTask):
    """One task of InfiniteBench, known by the file's name."""

    fields: Mapping[str, type] = {"context": str, "input": str}

    def __init__(self, path: Path) -> None:
        refuse_press_rows(path, "infinitebench")
        name = unpacked(path).stem
        if name not in TASKS:
            raise Refusal(
                f"the name of '{path.name}' is none of InfiniteBench's tasks: {', '.join(TASKS)}.", code="task_unknown"
            )
        self.task = name
        super().__init__(path)
        self.grader, self.new_tokens, self._question = TASKS[self.task]
        self.summary = f"InfiniteBench, {self.task}"
        self.metric = f"InfiniteBench's {self.grader.__name__.replace('_', ' ')}"

    def check(self, number: int, line: dict[str, Any]) -> None:
        if line.get("answer") in (None, [], ""):
            raise self.wrong(number, "lacks the field 'answer'")
        if self.task in CHOICES:
            options = line.get("options")
            if not isinstance(options, list) or len(options) != len(LETTERS):
                raise self.wrong(number, "lacks the field 'options' with its four entries")
            self._letter(number, line)
        if self.task == "code_run" and not _CALL.search(line["input"]):
            raise self.wrong(number, "names no call such as func_1(2) in the field 'input'")

    def _letter(self, number: int, line: dict[str, Any]) -> tuple[str, str]:
        """(text, letter) of the right option."""
        answers = _listed(line["answer"])
        if len(answers) == 2 and answers[1] in set(LETTERS):
            return answers[0], answers[1]
        if answers[0] not in texts(line["options"]):
            raise self.wrong(number, "has an answer that is none of its options")
        return answers[0], LETTERS[texts(line["options"]).index(answers[0])]

    def ask(self, line: dict[str, Any]) -> Posed:
        answers = self._letter(0, line) if self.task in CHOICES else _listed(line["answer"])
        options = "\n".join(
            f"{letter}. {option}" for letter, option in zip(LETTERS, line.get("options") or (), strict=False)
        )
        call = _CALL.search(line["input"])
        question = self._question.replace("{options}", options).replace("{call}", call.group() if call else "")
        return Posed(f"{line['context']}\n\n{question.replace('{input}', line['input'])}", answers)

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        return self.grader(output, answers)


def _listed(answer: Any) -> tuple[str, ...]:
    """An answer as strings: a value, a list, or a list in a list."""
    while isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], list):
        answer = answer[0]
    return texts(answer) if isinstance(answer, list) else (str(answer),)
