"""LongGenBench of Wu et al. (arXiv 2409.02076, 'Spinning the Golden Thread'): one long text of numbered sections, such
as a diary of 52 weeks, into some of which given events belong. Another benchmark of the same name: longgenbench_liu.py.

Fields (prompt, checks_once, checks_range, checks_periodic, type, prefix, number) are those of Dataset_short.json and
Dataset_long.json of github.com/mozhu621/LongGenBench; how sections are told apart ('#*#', then type and number) and
that generation ends with '*** finished' are taken from its prompts and from Evalution/inference.py and eval.py. Scored
is the completion rate (CR): the share of the wanted sections that were written. **Not scored** is what STIC-1 and
STIC-2 of the paper measure, whether a section holds the events it should: another model is asked for that there. The
official runs draw at temperature 0.95; these are greedy. `@tokens=N`: tokens to generate at most (the paper's settings
want 16K and 32K).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks.filetask import FileTask, Posed
from kvlens.lab.tasks.reasoning import MOST_TOKENS
from kvlens.refusal import Refusal

SEPARATOR, END = "#*#", "*** finished"
MOST_SECTIONS = 10_000


class LongGenBenchWu(FileTask):
    """Texts of many sections."""

    fields: Mapping[str, type] = {
        "prompt": str,
        "type": str,
        "number": int,
        "prefix": str,
        "checks_once": dict,
        "checks_range": dict,
        "checks_periodic": dict,
    }
    parameters: ClassVar[Mapping[str, int | str]] = {"tokens": 16_000}
    metric = "completion rate: share of the wanted sections (the events in them, STIC, need another model: not scored)"

    def __init__(self, path: Path, tokens: int = 16_000) -> None:
        if not 1 <= tokens <= MOST_TOKENS:
            raise Refusal(
                f"the parameter 'tokens' lies between 1 and {MOST_TOKENS:,}, not {tokens:,}.",
                code="parameter_out_of_range",
                parameter="tokens",
                value=tokens,
            )
        super().__init__(path)
        self.new_tokens = tokens
        self.summary = "LongGenBench of Wu et al. (2409.02076)"

    def check(self, number: int, line: dict[str, Any]) -> None:
        for name in ("prompt", "type"):
            if not line[name].strip():
                raise self.wrong(number, f"has an empty field '{name}'")
        if not 1 <= line["number"] <= MOST_SECTIONS:
            raise self.wrong(number, f"has a field 'number' outside 1 to {MOST_SECTIONS:,}")

    def ask(self, line: dict[str, Any]) -> Posed:
        target = f"{line['type']} 1 to {line['number']}"
        return Posed(line["prompt"], (target,), {"prefix": line["prefix"]})

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        kind, _, number = answers[0].rpartition(" 1 to ")
        written = output.partition(END)[0]
        if not written.strip():
            return 0.0
        distinct_values = set()
        for block in (facts.get("prefix", "") + written).split(SEPARATOR):
            named = re.search(rf"{re.escape(kind)} (\d+)", block)
            if named:
                distinct_values.add(int(named.group(1)))
        return len(distinct_values & set(range(1, int(number) + 1))) / int(number)
