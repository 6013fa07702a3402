"""The quality table: every method on the same generated prompts at the same budgets. Resumable; one line per trial is
kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from kvlens import tasks
from kvlens.lab.bench import kept as lines_kept
from kvlens.lab.bench.provenance import about, made_otherwise, origin
from kvlens.lab.bench.tablerequest import TableRequest
from kvlens.lab.bench.trialprompts import DEPTHS, Formats, Trial
from kvlens.lab.bench.trials import NEW_TOKENS, carry_out, missing
from kvlens.lab.results.names import TaskNames
from kvlens.lab.results.summary import grouped, summary

LOST = ("index", "depth", "seed", "preset", "overrides", "answer", "output")
"""what a table keeps of a trial whose answer was wrong, where it is not empty"""


class QualityRequest(TableRequest):
    """What to measure."""

    tasks: TaskNames = Field(default_factory=lambda given: tasks.usual(given["model"]))
    budgets: tuple[str, ...] = ("5%", "10%", "20%")
    length: int = Field(2048, ge=64)
    prompts: int = Field(25, ge=1)
    first_seed: int = 8_000_000

    def trials(self) -> Iterator[Trial]:
        """Prompt by prompt, so that an interrupted table has whole prompts."""
        for index in range(self.prompts):
            for task in self.tasks:
                for arm in self.arms():
                    place = DEPTHS[index % len(DEPTHS)], self.first_seed + index
                    yield Trial(task, self.length, *place, index, *arm)


def key(trial: Trial) -> str:
    """By which the table knows a trial."""
    known_values = f"{trial.task}/{trial.length}/{trial.index}/{trial.method}/{trial.budget}"
    more = ("" if trial.question == "in" else trial.question, trial.dtype)
    return "/".join((known_values, *filter(None, more)))


@lines_kept.alone
def measure(
    request: QualityRequest,
    path: Path,
    report: Callable[[int, int, dict[str, Any]], None],
    say: Callable[[str], None] = lines_kept.silent,
) -> dict[str, Any]:
    """Run what is not in `path` (one JSON line per trial) yet -> the table with its provenance. report(done, total,
    row); say(line) where kept trials are run again, and of methods that lack figures of the model.

    Raises ValueError for a file that does not hold trials.
    """
    import torch

    origins = {name: origin(request.model, name, request.first_seed) for name in request.methods}
    planned = list(request.trials())
    target = {key(trial) for trial in planned}
    results = lines_kept.read(path, ("key", "method", "origin"), lambda row: row["key"] in target)
    if line := made_otherwise(results, origins):
        say(line)
    for line in missing(request.model, request.methods):
        say(line)
    rows = [row for row in results if row["origin"] == origins[row["method"]]]
    visited = {row["key"] for row in rows}
    torch.set_num_threads(1)
    formats = Formats(request.model, dtype=request.dtype, first_seed=request.first_seed, names=request.methods)
    start_time = time.monotonic()
    for finished, trial in enumerate(planned):
        if key(trial) in visited:
            continue
        if time.monotonic() - start_time > 60 * request.minutes:
            break
        row = {"key": key(trial), **carry_out(*formats.of(trial), trial), "origin": origins[trial.method]}
        rows.append(row)
        lines_kept.append(path, row)
        report(finished + 1, len(planned), row)
    return _result(request, rows, origins, len(planned))


def collect(request: QualityRequest, path: Path) -> dict[str, Any]:
    """The table of what is in `path`, whatever code made it, without running anything: of every method the trials of
    one origin, the last in the file, and of every task the prompts that all methods in the file have been run on, so
    that a table that was stopped is balanced.

    Raises ValueError for a file that does not hold trials, or no whole prompt."""
    planned = {key(trial): trial for trial in request.trials()}
    results = lines_kept.read(path, ("key", "method", "origin"), lambda row: row["key"] in planned)
    origins = {row["method"]: row["origin"] for row in results}
    rows = {row["key"]: row for row in results if row["origin"] == origins[row["method"]]}
    requested = {name: trial for name, trial in planned.items() if trial.method in origins}
    gaps = {(trial.task, trial.index) for name, trial in requested.items() if name not in rows}
    whole = [row for row in rows.values() if (row["task"], row["index"]) not in gaps]
    if not whole:
        raise ValueError(f"'{path.name}' holds no prompt that all of its methods were run on: measure more first.")
    return _result(request, whole, origins, len(planned))


def _result(
    request: QualityRequest, rows: list[dict[str, Any]], origins: dict[str, str], planned: int
) -> dict[str, Any]:
    result = about(request.methods, request.model) | {
        "request": request.model_dump(mode="json"),
        "depths": DEPTHS,
        "new_tokens": {task: NEW_TOKENS[task] for task in request.tasks},
        "origins": origins,
        "trials": len(rows),
        "planned": planned,
    }
    return {"about": result, "lines": summarise(rows, request)}


def summarise(rows: list[dict[str, Any]], request: QualityRequest) -> list[dict[str, Any]]:
    """One line per method, budget and task, in the order asked for."""
    basis = ("method", "budget", "dtype", "task")
    groups = grouped(rows, basis)
    order = dict.fromkeys(
        tuple(getattr(trial, name) for name in basis) for trial in request.trials() if trial.index == 0
    )
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
