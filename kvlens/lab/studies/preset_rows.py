"""Rows of another preset beside a method's own in a published quality table, as a study.

    python -m kvlens.lab.studies.preset_rows TABLE METHOD PRESET --runs FOLDER [--minutes N] [--collect]

TABLE names a study file of kvlens/lab/bench/tables, `quality-smollm2` for one. The study is stored in the folder of
runs; run the command again to go on with it. The rows are written into the table's result file as `variants`;
`--collect` runs nothing and writes the rows of the trials that the study has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.quality import QualityRequest, lost
from kvlens.lab.bench.tablefile import quality_request
from kvlens.lab.bench.tablestudy import carry_out_table, stored_rows
from kvlens.lab.results.summary import grouped, summary
from kvlens.runs.request import RunRequest
from kvlens.studies.plan import Arm, ListedArm, StudyPlan

KIND = "variants"
"""of the study: all presets of one table's model and number format are arms of it"""
RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = dict[str, Any]


class PresetRequest(QualityRequest):
    """The trials that one method has in a table, under another preset. Full KV is not run again."""

    preset: str

    def arms(self) -> list[Arm]:
        """Return an arm for each budget."""
        shared = {"preset": self.preset, "question": self.question}
        return [Arm(method=name, budget=budget, **shared) for name in self.methods for budget in self.budgets]

    def plan(self) -> StudyPlan:
        """Return the study of the listed arms, with the table's settings."""
        prompts = tuple(self.prompt_ids())
        return StudyPlan(
            shared=RunRequest(model=self.model, dtype=self.dtype, device=self.device, threads=1),
            entrants=(),
            listed=tuple(ListedArm(arm=arm, prompts=prompts) for arm in self.arms()),
            traces=self.traces,
            generation="task",
        )


def preset_request(table: QualityRequest, method: str, preset: str, **changes: Any) -> PresetRequest:
    """Return the request of a method's rows under a preset. changes: other fields that are not the table's."""
    return PresetRequest(**{**table.model_dump(), "methods": (method,), "preset": preset, **changes})


def measure(request: PresetRequest, runs_dir: Path) -> list[Row]:
    """Run the trials that the study lacks, and return the rows. Raises ValueError, StudyBusy and TraceError as
    `carry_out_table`."""
    return list(carry_out_table(KIND, request, runs_dir, lambda *_: None, print).rows)


def collect(request: PresetRequest, runs_dir: Path) -> list[Row]:
    """Return the rows of the trials that the study has. Raises RunNotFound where nothing was measured."""
    keys = {arm.key() for arm in request.arms()}
    return [row for row in stored_rows(KIND, request, runs_dir) if row["arm"] in keys]


def variants(rows: Sequence[Row], preset: str) -> list[Row]:
    """Return a line per task and budget that has trials: as the table's lines, with `variant`, the preset."""
    basis = ("method", "budget", "task")
    return [
        dict(zip(basis, cell, strict=True)) | {"dtype": "", "variant": preset, **summary(group), "lost": lost(group)}
        for cell, group in grouped(rows, basis).items()
    ]


def main() -> None:
    """Measure the rows and write them into the table's result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("method")
    parser.add_argument("preset")
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs that the study is stored in")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long; what is done counts")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    table = quality_request(Path(arguments.table))
    request = preset_request(table, arguments.method, arguments.preset, minutes=arguments.minutes)
    rows = (collect if arguments.collect else measure)(request, arguments.runs)
    target = RESULTS / f"{arguments.table}.json"
    result = json.loads(target.read_text(encoding="utf-8"))
    provenance = about((arguments.method,), request.model)
    lines = variants(rows, arguments.preset)
    other_lines = [
        line
        for line in result.get("variants", [])
        if (line["method"], line["variant"]) != (arguments.method, arguments.preset)
    ]
    source = {name: provenance[name] for name in ("kvlens", "torch", "transformers", "machine", "date")}
    result["variants"] = [*other_lines, *(line | {"about": source} for line in lines)]
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
