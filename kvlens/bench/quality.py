"""The quality table: every method on the same generated prompts at the same budgets. Resumable; one line per trial is
kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from kvlens import methods, tasks
from kvlens.bench import kept as lines_kept
from kvlens.bench.provenance import about, made_otherwise, origin
from kvlens.bench.summary import grouped, summary
from kvlens.bench.tablerequest import TableRequest
from kvlens.bench.trials import DEPTHS, NEW_TOKENS, Formats, Trial, carry_out, missing
from kvlens.units import si_bytes


class QualityRequest(TableRequest):
    """What to measure."""

    tasks: tuple[str, ...] = Field(default_factory=lambda given: tasks.usual(given["model"]))
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
    known = f"{trial.task}/{trial.length}/{trial.index}/{trial.method}/{trial.budget}"
    more = ("" if trial.question == "in" else trial.question, trial.dtype)
    return "/".join((known, *filter(None, more)))


@lines_kept.alone
def measure(
    request: QualityRequest,
    kept: Path,
    report: Callable[[int, int, dict[str, Any]], None],
    say: Callable[[str], None] = lines_kept.silent,
) -> dict[str, Any]:
    """Run what is not in `kept` (one JSON line per trial) yet -> the table with its provenance. report(done, total,
    row); say(line) where kept trials are run again, and of methods that lack figures of the model.

    Raises ValueError for a file that does not hold trials.
    """
    import torch

    origins = {name: origin(request.model, name, request.first_seed) for name in request.methods}
    planned = list(request.trials())
    wanted = {key(trial) for trial in planned}
    found = lines_kept.read(kept, ("key", "method", "origin"), lambda row: row["key"] in wanted)
    if line := made_otherwise(found, origins):
        say(line)
    for line in missing(request.model, request.methods):
        say(line)
    rows = [row for row in found if row["origin"] == origins[row["method"]]]
    seen = {row["key"] for row in rows}
    torch.set_num_threads(1)
    formats = Formats(request.model, first_seed=request.first_seed, names=request.methods)
    begun = time.monotonic()
    for done, trial in enumerate(planned):
        if key(trial) in seen:
            continue
        if time.monotonic() - begun > 60 * request.minutes:
            break
        row = {"key": key(trial), **carry_out(*formats.of(trial), trial), "origin": origins[trial.method]}
        rows.append(row)
        lines_kept.append(kept, row)
        report(done + 1, len(planned), row)
    made = about(request.methods, request.model) | {
        "request": request.model_dump(mode="json"),
        "depths": DEPTHS,
        "new_tokens": {task: NEW_TOKENS[task] for task in request.tasks},
        "origins": origins,
        "trials": len(rows),
        "planned": len(planned),
    }
    return {"about": made, "lines": summarise(rows, request)}


def summarise(rows: list[dict[str, Any]], request: QualityRequest) -> list[dict[str, Any]]:
    """One line per method, budget and task, in the order asked for."""
    by = ("method", "budget", "dtype", "task")
    groups = grouped(rows, by)
    order = dict.fromkeys(tuple(getattr(trial, name) for name in by) for trial in request.trials() if trial.index == 0)
    return [{**dict(zip(by, cell, strict=True)), **summary(groups.get(cell, []))} for cell in order]


def markdown(result: dict[str, Any]) -> str:
    """The table for the docs: a row per method and budget, a column of exact match per task, then means over the
    tasks."""
    about, tasks = result["about"], result["about"]["request"]["tasks"]
    lines: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in result["lines"]:
        lines.setdefault((line["method"], line["budget"]), {})[line["task"]] = line
    head = [
        "method",
        "budget",
        *(f"{task}: exact (95 %), n" for task in tasks),
        "coverage",
        "attended",
        "resident",
        "to device per step",
    ]
    text = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (name, budget), by_task in lines.items():
        some = [line for line in by_task.values() if line["n"]]
        of = (
            f"{budget} of attended tokens"
            if any(line["rule"] == "attended tokens" for line in by_task.values())
            else budget or "none"
        )
        cells = [methods.get(name).title, of, *(_cell(by_task.get(task)) for task in tasks)]
        if some:
            weights = [line["n"] for line in some]
            mean = {
                c: float(np.average([line[c] for line in some], weights=weights))
                for c in ("coverage", "attended_share", "resident_share", "h2d_bytes_per_step")
            }
            cells += [f"{mean['coverage']:.2f}", f"{mean['attended_share']:.1%}", f"{mean['resident_share']:.1%}"]
            cells.append(si_bytes(mean["h2d_bytes_per_step"]))
        else:
            cells += ["", "", "", ""]
        text.append(f"| {' | '.join(cells)} |")
    where = about["machine"]["processor"], about["machine"]["cores"]
    text += [
        "",
        f"{about['trials']} of {about['planned']} trials, model {about['request']['model']}, "
        f"{about['request']['length']} tokens, {ORDER[about['request'].get('question', 'in')]}, "
        f"{about['date']}, {where[0]}, {where[1]} cores, torch {about['torch']}, transformers {about['transformers']}.",
    ]
    return "\n".join(text) + "\n"


ORDER = {"in": "question read with its context", "after": "question fed after the context was placed"}
INTRODUCTION = """# Quality: every method, the same prompts, the same budgets

Made by `kvlens bench quality`; all figures with their provenance are in `benchmarks/results/quality.json` and on the
Benchmarks page.

*Budget*: peak bytes of KV on the device inside a decode step, as a share of full KV of prompt and output; everything
held counts (slots, tables, summaries, staging), decoded tokens too. A method whose floor is above the budget is
refused, and the cell says what it needs (mean). A method that keeps all KV on the device by design is held to the same
share of *attended* tokens instead (`keep`). *Exact match* of the answer with the 95 % Wilson interval and the number of
prompts; a list counts when all eight entries are right. *Coverage*: share of full attention's mass on tokens attended
exactly, mean over steps, layers and query heads (rebuilt tokens and summaries do not count). *Attended*: entries in the
softmax that are tokens, share of the prompt. *Resident*: peak, as budgets count it. The last four columns are means
over the tasks, weighted by prompts.

Every method runs with its preset for this model; no preset was chosen on these prompts (docs/fidelity.md says what was
chosen on which). Coverage is not an answer: heads that only look at the first tokens fill it, and one lost needle
hardly lowers it.

"""


def document(result: dict[str, Any]) -> str:
    """The page of the docs: what the columns mean, and the table."""
    return INTRODUCTION + markdown(result)


def _cell(line: dict[str, Any] | None) -> str:
    if line is None or not (line["n"] or line["infeasible"]):
        return "not run"
    if not line["n"]:
        return f"infeasible, needs {line['smallest_feasible']:.0%}"
    extra = f" (+{line['infeasible']} infeasible)" if line["infeasible"] else ""
    return f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['n']}{extra}"
