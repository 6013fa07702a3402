"""LongBench files (one dataset a file, such as hotpotqa.jsonl, or hotpotqa_e.jsonl of LongBench-E).

Fields and metrics are taken from github.com/THUDM/LongBench: LongBench/README.md ("Data Format": input, context,
answers, length, dataset, language, all_classes, _id), LongBench/eval.py (dataset -> metric; the best of the answers
counts; of trec, triviaqa, samsum and lsht only the first line of the output) and config/dataset2maxlen.json (tokens to
generate). The instructions around a text are ours, so figures can be compared between methods but not with published
ones; where the official dataset2prompt.json lies beside the file or in a folder `config` next to it, its prompts are
used instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlens.lab.tasks import metrics
from kvlens.lab.tasks.filetask import FileTask, Posed, texts
from kvlens.lab.tasks.pressrows import refuse_press_rows

Metric = Callable[[str, str], float]

DATASETS: dict[str, tuple[Metric | None, int]] = {
    "narrativeqa": (metrics.qa_f1, 128),
    "qasper": (metrics.qa_f1, 128),
    "multifieldqa_en": (metrics.qa_f1, 64),
    "multifieldqa_zh": (metrics.qa_f1_zh, 64),
    "hotpotqa": (metrics.qa_f1, 32),
    "2wikimqa": (metrics.qa_f1, 32),
    "musique": (metrics.qa_f1, 32),
    "dureader": (metrics.rouge_l_zh, 128),
    "gov_report": (metrics.rouge_l, 512),
    "qmsum": (metrics.rouge_l, 512),
    "multi_news": (metrics.rouge_l, 512),
    "vcsum": (metrics.rouge_l_zh, 512),
    "trec": (None, 64),
    "triviaqa": (metrics.qa_f1, 32),
    "samsum": (metrics.rouge_l, 128),
    "lsht": (None, 64),
    "passage_count": (metrics.count, 32),
    "passage_retrieval_en": (metrics.retrieval, 32),
    "passage_retrieval_zh": (metrics.retrieval_zh, 32),
    "lcc": (metrics.code_similarity, 64),
    "repobench-p": (metrics.code_similarity, 64),
}
"""dataset -> (metric, None for classification; tokens to generate)"""
FIRST_LINE = frozenset(("trec", "triviaqa", "samsum", "lsht"))
CODE = frozenset(("lcc", "repobench-p"))
FEW_SHOT = frozenset(("trec", "triviaqa", "samsum", "lsht"))


class LongBench(FileTask):
    """One dataset of LongBench."""

    fields: Mapping[str, type] = {"input": str, "context": str, "answers": list, "dataset": str}

    def __init__(self, path: Path) -> None:
        refuse_press_rows(path, "longbench")
        self.official = _official(path)
        super().__init__(path)
        datasets = {_plain(line["dataset"]) for _, line in self.lines}
        if len(datasets) > 1:
            raise ValueError(
                f"'{path.name}' mixes the datasets {', '.join(sorted(datasets))}; give one file per dataset."
            )
        self.dataset = datasets.pop()
        metric, self.new_tokens = DATASETS[self.dataset]
        if metric in (metrics.qa_f1_zh, metrics.rouge_l_zh):
            metrics.zh_words("")  # says now, not after the first run, what is missing
        self.summary = f"LongBench, {self.dataset}"
        self.metric = f"LongBench's {metric.__name__ if metric else 'classification'}"

    def check(self, number: int, line: dict[str, Any]) -> None:
        if _plain(line["dataset"]) not in DATASETS:
            raise self.wrong(number, f"has the dataset '{str(line['dataset'])[:40]}', which LongBench does not have")
        if not line["answers"]:
            raise self.wrong(number, "has an empty list 'answers'")
        if DATASETS[_plain(line["dataset"])][0] is None and not isinstance(line.get("all_classes"), list):
            raise self.wrong(number, "lacks the field 'all_classes', which a classification needs")

    def ask(self, line: dict[str, Any]) -> Posed:
        return Posed(self._prompt(line), texts(line["answers"]), {"classes": line.get("all_classes")})

    def _prompt(self, line: dict[str, Any]) -> str:
        context, question = line["context"], line["input"]
        if self.dataset in self.official:
            # Not str.format: braces of a code context must stay, and a template's other fields are refused by nobody.
            head, _, tail = self.official[self.dataset].partition("{context}")
            return head.replace("{input}", question) + context + tail.replace("{input}", question)
        if self.dataset in CODE:
            return f"Continue this code with its next line.\n{context}{question}Next line:\n"
        if self.dataset in FEW_SHOT:
            return f"{context}\n{question}"
        task_line = f"\n\nTask: {question}" if question else ""
        return f"Read this text.\n\n{context}{task_line}\n\nAnswer:"

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        return grade(self.dataset, output, answers, facts.get("classes"))


def grade(dataset: str, output: str, answers: tuple[str, ...], classes: list[str] | None) -> float:
    """Return the score of an output by the dataset's metric, 0 to 1: the best of the answers counts."""
    if dataset in FIRST_LINE:
        output = output.lstrip("\n").split("\n")[0]
    metric = DATASETS[dataset][0]
    if metric is None:
        return max(metrics.classification(output, answer, classes or answers) for answer in answers)
    return max(metric(output, answer) for answer in answers)


def _plain(dataset: str) -> str:
    """LongBench-E's datasets end in _e."""
    return dataset.removesuffix("_e")


def _official(path: Path) -> dict[str, str]:
    """Dataset -> prompt of the official dataset2prompt.json, where it is at hand. Raises ValueError when it is not
    one."""
    for place in (
        path.parent / "dataset2prompt.json",
        path.parent / "config" / "dataset2prompt.json",
        path.parent.parent / "config" / "dataset2prompt.json",
    ):
        if place.is_file():
            prompts = json.loads(place.read_text(encoding="utf-8"))
            if not isinstance(prompts, dict) or not all(
                isinstance(text, str) and "{context}" in text for text in prompts.values()
            ):
                raise ValueError(
                    f"'{place.name}' beside '{path.name}' does not map datasets to prompts with a {{context}}."
                )
            return prompts
    return {}
