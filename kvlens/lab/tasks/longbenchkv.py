"""LongBench as kvpress stores it (the data set Xnhyacinth/LongBench): one file per dataset, or all of them.

The columns are those of kvlens.lab.tasks.pressrows, the answers in `answers`, and `all_classes` of a classification.
Metrics are LongBench's (kvlens.lab.tasks.longbench), which kvpress's evaluation/benchmarks/longbench/
calculate_metrics.py uses as well. Datasets of LongBench-E end in _e or -e.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks import metrics
from kvlens.lab.tasks.longbench import DATASETS, grade
from kvlens.lab.tasks.pressrows import PressRows


class LongBenchRows(PressRows):
    """Datasets of LongBench, mixed or one of them."""

    benchmark = "LongBench"
    answers: ClassVar[str] = "answers"
    metric = "LongBench's, of the row's dataset"

    def __init__(self, path: Path, task: str = "") -> None:
        super().__init__(path, task)
        names = {_dataset(line) for _, line in self.lines}
        if any(DATASETS[name][0] in (metrics.qa_f1_zh, metrics.rouge_l_zh) for name in names):
            metrics.zh_words("")  # says now, not after the first run, what is missing

    def check(self, number: int, line: dict[str, Any]) -> None:
        super().check(number, line)
        name = _dataset(line)
        if name not in DATASETS:
            raise self.wrong(number, f"has the task '{line['task'][:40]}', which LongBench does not have")
        if DATASETS[name][0] is None and not isinstance(line.get("all_classes"), list):
            raise self.wrong(number, "lacks the field 'all_classes', which a classification needs")

    def facts_of(self, line: dict[str, Any]) -> dict[str, Any]:
        return {"task": _dataset(line), "classes": line.get("all_classes")}

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        name = facts.get("task") or _dataset(self.lines[0][1])
        return grade(name, output, answers, facts.get("classes"))


def _dataset(line: Mapping[str, Any]) -> str:
    """Return the dataset of a row, without the ending of LongBench-E."""
    return str(line["task"]).removesuffix("_e").removesuffix("-e")
