"""RULER files, as RULER's prepare.py writes them (NAME/validation.jsonl or NAME.jsonl, NAME such as niah_single_1, vt,
cwe, fwe, qa_1), and by HELMET's names (NAME/validation_131072.jsonl).

Fields (index, input, outputs, length, and in newer versions answer_prefix, which continues the input) are taken from
github.com/hsiehjackson/RULER, scripts/data/synthetic/*.py; metrics from scripts/eval/synthetic/constants.py:
string_match_part for question answering, string_match_all for everything else. Prompts are used as they stand.

HELMET's rows have parts of a prompt: context, query or question, type_needle_v, example, and the answers in answer or
outputs (github.com/princeton-nlp/HELMET, data.py, load_ruler; configs/recall.yaml names the files). A row that has an
`input` is used as it stands; any other is put together with instructions of ours. Tokens
to generate follow scripts/data/synthetic/constants.py; its figure for vt differs between versions (30 to 100), the
largest is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlens.lab.tasks import metrics
from kvlens.lab.tasks.filetask import FileTask, Posed, texts
from kvlens.refusal import Refusal

NEW_TOKENS = {
    "niah": 128,
    "vt": 100,
    "variable_tracking": 100,
    "cwe": 120,
    "common_words": 120,
    "fwe": 50,
    "freq_words": 50,
    "qa": 64,
}
SUBSET = re.compile(r"(validation|test)(_\d+)?")
"""file names that say at most a length; the folder names the task"""
QUESTIONS = {
    "niah": "\n\nWhich {type_needle_v} does the text give for {query}? List all of them.\nAnswer:",
    "vt": "\n\nWhich variables hold the value {query} in the end? List all of them.\nAnswer:",
    "cwe": "\n\nWhich 10 words appear most often in the list?\nAnswer:",
    "fwe": "\n\nWhich three coded words appear most often?\nAnswer:",
    "qa": "\n\nAnswer the question with words of the documents alone.\nQuestion: {query}\nAnswer:",
}
"""of rows without an `input`, behind their context: ours"""
ALIASES = {"variable_tracking": "vt", "common_words": "cwe", "freq_words": "fwe"}


class RulerFile(FileTask):
    """One task of RULER."""

    fields: Mapping[str, type] = {}

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() == ".parquet":
            raise Refusal(
                f"'{path.name}' is RULER as kvpress stores it: name it rulerkv:{path}.", code="other_kind_of_file"
            )
        super().__init__(path)
        family = path.parent.name if SUBSET.fullmatch(self.stem) else self.stem
        task_name = next((name for name in NEW_TOKENS if family.lower().startswith(name)), None)
        if task_name is None:
            raise Refusal(
                f"the name '{family}' of '{path.name}' does not say which task of RULER it is: it should begin with "
                f"{', '.join(NEW_TOKENS)}.",
                code="task_unknown",
                name=family,
            )
        self.question = QUESTIONS[ALIASES.get(task_name, task_name)]
        self.part = task_name == "qa"
        self.new_tokens = NEW_TOKENS[task_name]
        self.summary = f"RULER, {family}"
        self.metric = f"RULER's string_match_{'part' if self.part else 'all'}"

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not isinstance(line.get("input", line.get("context")), str):
            name = "input" if "context" not in line else "context"
            raise self.wrong(number, f"lacks the field '{name}'" if name not in line else f"has no text in '{name}'")
        answers = line.get("outputs", line.get("answer"))
        if answers is None:
            raise self.wrong(number, "lacks the field 'outputs'")
        if not isinstance(answers, list) and ("outputs" in line or not isinstance(answers, str)):
            place = f"{self.unit} {number} of '{self.path.name}'"
            raise ValueError(f"{place}: the field '{'outputs' if 'outputs' in line else 'answer'}' is not a list.")
        if not answers:
            raise self.wrong(number, "has an empty list 'outputs'")

    def ask(self, line: dict[str, Any]) -> Posed:
        answers = line.get("outputs", line.get("answer"))
        expected = texts(answers) if isinstance(answers, list) else (str(answers),)
        if "input" in line:
            return Posed(line["input"] + str(line.get("answer_prefix") or ""), expected)
        parts = {
            "query": str(line.get("query", line.get("question", ""))),
            "type_needle_v": str(line.get("type_needle_v", "values")),
        }
        question = self.question
        for name, value in parts.items():
            question = question.replace("{" + name + "}", value)
        example = f"{line['example']}\n\n" if line.get("example") else ""
        return Posed(example + line["context"], expected, question=question)

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        return (metrics.string_match_part if self.part else metrics.string_match_all)(output, answers)
