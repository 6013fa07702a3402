"""RULER files, as RULER's prepare.py writes them: NAME/validation.jsonl or NAME.jsonl, NAME such as niah_single_1, vt,
cwe, fwe, qa_1.

Fields (index, input, outputs, length, and in newer versions answer_prefix, which continues the input) are taken from
github.com/hsiehjackson/RULER, scripts/data/synthetic/*.py; metrics from scripts/eval/synthetic/constants.py:
string_match_part for question answering, string_match_all for everything else. Prompts are used as they stand. Tokens
to generate follow scripts/data/synthetic/constants.py; its figure for vt differs between versions (30 to 100), the
largest is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlens.lab.tasks import metrics
from kvlens.lab.tasks.filetask import FileTask, Posed, texts

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
SUBSETS = ("validation", "test")
"""file names that say nothing; the folder does"""


class RulerFile(FileTask):
    """One task of RULER."""

    fields: Mapping[str, type] = {"input": str, "outputs": list}

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() == ".parquet":
            raise ValueError(f"'{path.name}' is RULER as kvpress stores it: name it rulerkv:{path}.")
        super().__init__(path)
        family = path.parent.name if path.stem in SUBSETS else path.stem
        task_name = next((name for name in NEW_TOKENS if family.lower().startswith(name)), None)
        if task_name is None:
            raise ValueError(
                f"the name '{family}' of '{path.name}' does not say which task of RULER it is: it should begin with "
                f"{', '.join(NEW_TOKENS)}."
            )
        self.part = task_name == "qa"
        self.new_tokens = NEW_TOKENS[task_name]
        self.summary = f"RULER, {family}"
        self.metric = f"RULER's string_match_{'part' if self.part else 'all'}"

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not line["outputs"]:
            raise self.wrong(number, "has an empty list 'outputs'")

    def ask(self, line: dict[str, Any]) -> Posed:
        return Posed(line["input"] + str(line.get("answer_prefix") or ""), texts(line["outputs"]))

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        return (metrics.string_match_part if self.part else metrics.string_match_all)(output, answers)
