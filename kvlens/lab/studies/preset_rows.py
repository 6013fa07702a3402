"""Rows of another preset beside a method's own in a published quality table.

    python -m kvlens.lab.studies.preset_rows TABLE METHOD PRESET --kept FILE [--collect]

TABLE names a study file of kvlens/lab/bench/tables, `quality-smollm2` for one. Trials are kept one a line, so that an
interrupted measurement goes on. The rows are written into the table's result file as `variants`; `--collect` runs
nothing and writes the rows of the trials that FILE has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlens.lab.bench import kept as keeping
from kvlens.lab.bench.provenance import about, made_elsewhere
from kvlens.lab.bench.quality import QualityRequest, lost
from kvlens.lab.bench.tablefile import quality_request
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.bench.trials import carry_out
from kvlens.lab.results.summary import grouped, summary

RESULTS = Path(__file__).resolve().parents[1] / "results"
_NEEDED = ("task", "index", "budget", "method", "preset")
Row = dict[str, Any]


def trials_of(request: QualityRequest, method: str) -> list[Trial]:
    """Return the trials that a method has in a table."""
    return [
        Trial(task, length, depth, seed, index, method, budget, request.question)
        for task, length, depth, seed, index in request.places()
        for budget in request.budgets
    ]


def measure(request: QualityRequest, method: str, preset: str, path: Path) -> None:
    """Run the trials that `path` lacks."""
    import torch

    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load

    finished = {_place(row) for row in keeping.read(path, _NEEDED, lambda row: row["preset"] == preset)}
    torch.set_num_threads(1)
    engine = Engine(load(request.model, request.device, request.dtype))
    prompts = Prompts(engine, request.first_seed, (method,))
    for trial in trials_of(request, method):
        if (trial.task, trial.index, trial.budget) not in finished:
            keeping.append(path, carry_out(engine, prompts, trial, preset=preset))


def variants(rows: Sequence[Row], request: QualityRequest, method: str, preset: str) -> list[Row]:
    """Return a line per task and budget of the request that has trials: as the table's lines, with `variant`, the
    preset. A trial that was kept twice counts once."""
    places = {(trial.task, trial.index, trial.budget) for trial in trials_of(request, method)}
    trials = {_place(row): row for row in rows if row["method"] == method and row["preset"] == preset}
    basis = ("method", "budget", "task")
    groups = grouped((row for place, row in trials.items() if place in places), basis)
    return [
        dict(zip(basis, cell, strict=True)) | {"dtype": "", "variant": preset, **summary(group), "lost": lost(group)}
        for cell, group in groups.items()
    ]


def _place(row: Row) -> tuple[str, int, str]:
    return row["task"], row["index"], row["budget"]


def main() -> None:
    """Measure the rows and write them into the table's result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("method")
    parser.add_argument("preset")
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--collect", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    request = quality_request(Path(arguments.table))
    if not arguments.collect:
        measure(request, arguments.method, arguments.preset, arguments.kept)
    rows = keeping.read(arguments.kept, _NEEDED, lambda row: True)
    target = RESULTS / f"{arguments.table}.json"
    result = json.loads(target.read_text(encoding="utf-8"))
    provenance = about((arguments.method,), request.model) | made_elsewhere(rows)
    lines = variants(rows, request, arguments.method, arguments.preset)
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
