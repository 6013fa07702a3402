"""The quality table: every method on the same generated prompts at the same budgets, as a study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from kvlens import tasks
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.tablerequest import Place, TableRequest
from kvlens.lab.bench.tablestudy import Measured, Say, Watch, carry_out_table, silent, stored_rows
from kvlens.lab.bench.trialprompts import DEPTHS
from kvlens.lab.bench.trials import NEW_TOKENS
from kvlens.lab.results.names import TaskNames
from kvlens.lab.results.summary import grouped, summary
from kvlens.workers.lanes import Crew

LOST = ("index", "depth", "seed", "preset", "overrides", "answer", "output")
"""what a table keeps of a trial whose answer was wrong, where it is not empty"""


class QualityRequest(TableRequest):
    """What to measure."""

    tasks: TaskNames = Field(default_factory=lambda given: tasks.usual(given["model"]))
    budgets: tuple[str, ...] = ("5%", "10%", "20%")
    length: int = Field(2048, ge=64)
    prompts: int = Field(25, ge=1)
    first_seed: int = 8_000_000

    def places(self) -> Iterator[Place]:
        """Yield the prompts of all tasks in turn, so that an interrupted table has whole rounds."""
        for index in range(self.prompts):
            for task in self.tasks:
                yield task, self.length, DEPTHS[index % len(DEPTHS)], self.first_seed + index, index


def measure(
    request: QualityRequest,
    runs_dir: Path,
    watch: Watch,
    say: Say = silent,
    crew: Crew | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run what the table's study lacks, and return the table with its provenance. watch(finished, total, row).
    say(line): where stored trials are run again, and of methods that lack figures of the model.

    Raises StudyBusy while another process measures it.
    """
    return _result(request, carry_out_table("quality", request, runs_dir, watch, say, crew, cancelled))


def collect(request: QualityRequest, runs_dir: Path) -> dict[str, Any]:
    """Return the table of the trials that its study has, whatever code made them, without running anything: of every
    method the trials of one origin, the last in the file, and of every task the prompts that all methods that have
    trials were run on, so that a table that was stopped is balanced.

    Raises ValueError where there is no whole prompt."""
    rows = stored_rows("quality", request, runs_dir)
    origins = {row["method"]: row["origin"] for row in rows}
    rows = [row for row in rows if row["origin"] == origins[row["method"]]]
    cells = {(row["task"], row["index"], row["method"], row["budget"], row["dtype"]) for row in rows}
    arms = [arm for arm in request.arms() if arm.method in origins]
    gaps = {
        (task, index)
        for task, _, _, _, index in request.places()
        for arm in arms
        if (task, index, arm.method, arm.budget, arm.dtype) not in cells
    }
    whole = [row for row in rows if (row["task"], row["index"]) not in gaps]
    if not whole:
        raise ValueError("the table's study has no prompt that all of its methods were run on: measure more first.")
    return _result(request, Measured(whole, origins, request.prompts * len(request.tasks) * len(request.arms())))


def _result(request: QualityRequest, measured: Measured) -> dict[str, Any]:
    product = about(request.methods, request.model) | {
        "request": request.model_dump(mode="json"),
        "depths": DEPTHS,
        "new_tokens": {task: NEW_TOKENS[task] for task in request.tasks},
        "origins": measured.origins,
        "trials": len(measured.rows),
        "planned": measured.planned,
    }
    return {"about": product, "lines": summarise(measured.rows, request)}


def summarise(rows: Sequence[dict[str, Any]], request: QualityRequest) -> list[dict[str, Any]]:
    """One line per method, budget and task, in the order asked for."""
    basis = ("method", "budget", "dtype", "task")
    groups = grouped(rows, basis)
    order = [(arm.method, arm.budget, arm.dtype, task) for task in request.tasks for arm in request.arms()]
    return [
        {**dict(zip(basis, cell, strict=True)), **summary(groups.get(cell, [])), "lost": lost(groups.get(cell, []))}
        for cell in order
    ]


def lost(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials of a cell whose answer was wrong: what makes them again, and what came."""
    wrong = [row for row in rows if row.get("exact") == 0]
    empty: tuple[Any, ...] = (None, "", {})
    return [
        {name: row[name] for name in LOST if row.get(name) not in empty}
        for row in sorted(wrong, key=lambda row: row["index"])
    ]
