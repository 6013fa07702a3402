"""RULER as kvpress stores it: one Parquet file per length with rows of all thirteen tasks.

The columns are those of kvlens.lab.tasks.pressrows, the answers in `answer`. Metrics are those of kvpress's
evaluation/benchmarks/ruler/calculate_metrics.py, which are RULER's own: string_match_part for tasks whose name begins
with qa, string_match_all for the others, control characters of the output dropped.

The rows of a task stand together, so that the first ones are of one task: `rulerkv:PATH@task=vt` takes those of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvlens.lab.tasks import metrics
from kvlens.lab.tasks.pressrows import PressRows

_CONTROL = re.compile(r"[\x00-\x1f]")


class RulerRows(PressRows):
    """Tasks of RULER, mixed or one of them."""

    benchmark = "RULER"
    metric = "RULER's string_match_all, for qa string_match_part"

    def check(self, number: int, line: dict[str, Any]) -> None:
        super().check(number, line)
        if not line["question"].strip():
            raise self.wrong(number, "has an empty context or question")

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        is_part = str(facts.get("task", "")).startswith("qa") or facts.get("part")
        return (metrics.string_match_part if is_part else metrics.string_match_all)(
            _CONTROL.sub("", output.strip()), answers
        )
