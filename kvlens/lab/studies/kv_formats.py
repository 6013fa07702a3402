"""What share of full KV each method holds where KV is stored in 16 bits, at the budgets of the quality tables, as a
study.

    python -m kvlens.lab.studies.kv_formats --runs FOLDER [--model MODEL] [--lengths 1024,2048] [--budgets 5%,20%]
        [--minutes N] [--out FILE]

The quality tables store KV in float32. Papers count 16-bit KV. A method that keeps keys and values as they are holds
nearly the same share of both; codes of few bits, indices and tables do not shrink with the format, so their share of
16-bit KV is larger, and a budget may refuse them. One prompt of a length, a few steps: the peak follows from sizes, not
from answers. The study is stored in the folder of runs; run the command again to go on with it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlens import methods
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.tablerequest import Place, TableRequest
from kvlens.lab.bench.tablestudy import carry_out_table
from kvlens.lab.results.names import TaskNames
from kvlens.studies.plan import StudyPlan

TASK, SEED, STEPS, DTYPE = "niah_single", 8_500_000, 2, "bfloat16"


class FormatRequest(TableRequest):
    """One prompt of each length; its answer ends after STEPS tokens, and budgets are divided for the whole answer."""

    tasks: TaskNames = (TASK,)
    lengths: tuple[int, ...]
    prompts: int = 1
    first_seed: int = SEED
    dtype: str = DTYPE

    def places(self) -> Iterator[Place]:
        """Yield the prompts."""
        return ((task, length, 0.5, self.first_seed, 0) for task in self.tasks for length in self.lengths)

    def plan(self) -> StudyPlan:
        """Return the table's study without its noise floor."""
        plan = super().plan()
        shared = plan.shared.model_copy(update={"max_new": STEPS})
        return plan.model_copy(update={"shared": shared, "reference_dtypes": (), "generation": "cut"})


def measure(request: FormatRequest, runs_dir: Path) -> dict[str, Any]:
    """Run the trials that the study lacks, and return {"about", "lines"}: of each length, method and budget the peak as
    a share of full KV in 16 bits, or the least share that is feasible."""
    measured = carry_out_table("formats", request, runs_dir, lambda *_: None, print)
    fields: dict[str, Any] = {"model": request.model, "task": TASK, "dtype": request.dtype}
    fields |= {"lengths": list(request.lengths), "budgets": list(request.budgets), "steps": STEPS}
    return {"about": about(request.methods, request.model) | fields, "lines": list(map(line_of, measured.rows))}


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the preset and the peak of one arm, or what it needs, or why it cannot be run."""
    line = {name: row[name] for name in ("length", "method", "budget")}
    if "infeasible" in row:
        return line | {"needs": row["infeasible"]}
    if "refused" in row:
        return line | {"refused": row["refused"]}
    return line | {"preset": row["preset"], "resident_share": row["resident_share"]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs that the study is stored in")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="1024,2048,4096")
    parser.add_argument("--budgets", default="5%,10%,20%,40%")
    parser.add_argument("--methods", default=",".join(methods.registry()))
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=Path("build/formats.json"))
    arguments = parser.parse_args()
    lists = {name: tuple(getattr(arguments, name).split(",")) for name in ("lengths", "budgets", "methods")}
    request = FormatRequest(model=arguments.model, minutes=arguments.minutes, **lists)  # type: ignore[arg-type]
    result = measure(request, arguments.runs)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
