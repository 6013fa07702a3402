"""What a trained router brings SeKV on a real model: answers and zooms of a trained, an untrained and no router.

    python -m kvlens.lab.studies.sekv_router --rows FILE [--part I/N] [--cells NAME,...] [--prompts N]

Prompts, lengths and budgets are those of the quality tables. Every arm has the parameters that those tables run SeKV
with at that length and budget; an arm changes the router, or what of it decides. It runs every N-th prompt from the
I-th on, appends a row for each arm to FILE and leaves out what is there. `kvlens.lab.studies.sekv_router_page` makes
the tables and the page of the rows.

It is no study of kvlens.studies: it counts what the router asks for inside each step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.lab.bench.trialprompts import DEPTHS, Prompts, Trial
from kvlens.lab.bench.trials import NEW_TOKENS, carry_out, chosen, header
from kvlens.lab.studies.sekv_zone_watch import Decisions, Watched
from kvlens.lab.studies.sekv_zones import room
from kvlens.methods.fitting import with_changes
from kvlens.methods.sekv.method import SeKV

FIRST_SEED = 8_000_000
"""of the quality tables"""
ARMS: dict[str, dict[str, Any]] = {
    "trained": {"router": "trained"},
    "untrained": {"router": "pca"},
    "trained, all that fits": {"router": "trained", "tau": 1e-6},
    "untrained, all that fits": {"router": "pca", "zoom_rate": 1.0},
    "no-coarse": {**SeKV.presets["no-coarse"], "zones": "head"},
}
"""name -> parameters over those of the quality tables"""
DECIDED = ("trained", "untrained")
"""arms that are run a second time, fed the tokens of full KV, to count what they ask for"""


@dataclass(frozen=True)
class Cell:
    """A task, a length and a budget of the quality tables."""

    task: str
    length: int
    budget: str
    question: str = "in"

    @property
    def name(self) -> str:
        return f"{self.task}/{self.length}/{self.budget or 'none'}/{self.question}"


CELLS = (
    Cell("niah_single", 1024, "20%"),
    Cell("niah_multikey", 1024, "20%"),
    Cell("kv_lookup", 1024, "20%"),
    Cell("niah_single", 1024, "40%"),
    Cell("niah_multikey", 1024, "40%"),
    Cell("kv_lookup", 1024, "40%"),
    Cell("niah_single", 1024, "50%"),
    Cell("niah_single", 1024, ""),
    Cell("niah_single", 1024, "20%", "after"),
    Cell("niah_single", 2048, "20%"),
    Cell("niah_single", 4096, "20%"),
)
"""in the order in which they are run"""


def measure(
    engine: Engine, prompts: Prompts, cell: Cell, index: int, arms: Sequence[str], deciding: bool
) -> Iterator[dict[str, Any]]:
    """Run some arms on one prompt, each a row; `full` is full KV. deciding: count what DECIDED ask for, too."""
    depth, seed = DEPTHS[index % len(DEPTHS)], FIRST_SEED + index
    trial = Trial(cell.task, cell.length, depth, seed, index, "sekv", cell.budget, cell.question)
    place = {"cell": cell.name, "index": index}
    if "full" in arms:
        yield place | {"arm": "full"} | carry_out(engine, prompts, replace(trial, method="full", budget=""))
    reference: tuple[int, ...] = ()
    for arm, changes in ARMS.items():
        if arm in arms:
            row = carry_out(engine, prompts, trial, changes)
            if deciding and arm in DECIDED and "exact" in row:
                reference = reference or read_full(engine, prompts, trial)
                row |= {"decided": decide(engine, prompts, trial, changes, reference)}
            yield place | {"arm": arm} | row


def read_full(engine: Engine, prompts: Prompts, trial: Trial) -> tuple[int, ...]:
    """Return the tokens of full KV."""
    full, planned = methods.get(methods.REFERENCE), NEW_TOKENS[trial.task]
    options = Options(planned, planned=planned)
    read = prompts.read(trial, SeKV)
    return tuple(engine.run(prompts.prompt(trial), full, full.Parameters(), None, options, read=read).ids)


def decide(
    engine: Engine, prompts: Prompts, trial: Trial, changes: dict[str, Any], reference: tuple[int, ...]
) -> dict[str, float]:
    """Count what SeKV asks for, is granted and is refused while it is fed the tokens of full KV."""
    prompt, read, planned = prompts.prompt(trial), prompts.read(trial, SeKV), NEW_TOKENS[trial.task]
    free = Options(planned, planned=planned)
    limit = Budget.parse(trial.budget) if trial.budget else None
    choice = with_changes(SeKV, chosen(engine, prompt, SeKV, header(trial, engine.loaded.name), limit, free), changes)
    forced = Options(planned, planned=planned, forced=reference, coverage=True, oracle="off")
    sink = Decisions()
    try:
        engine.run(prompt, Watched, choice.params, limit, forced, sink, read=read)
    except BudgetInfeasible:
        return {}
    return sink.figures(room(Watched.layouts[0], engine.loaded.shape)) | sink.requests()


def finished(paths: Sequence[Path]) -> dict[tuple[str, int], set[str]]:
    """Return the arms whose rows are in some files, by cell and prompt."""
    arms: dict[tuple[str, int], set[str]] = {}
    for row in read_rows([path for path in paths if path.exists()]):
        arms.setdefault((row["cell"], row["index"]), set()).add(row["arm"])
    return arms


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rows of some files; a line that was cut off is left out."""
    rows = []
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


@dataclass(frozen=True)
class Plan:
    """What is run of the study."""

    part: tuple[int, int] = (0, 1)
    """(I, N): every N-th prompt from the I-th on"""
    cells: Sequence[str] = tuple(cell.name for cell in CELLS)
    arms: Sequence[str] = ("full", *ARMS)
    prompts: int = 30
    decided: int = 30
    """prompts of a cell on which what is asked for is counted"""


def run_part(model: str, path: Path, plan: Plan, earlier: Sequence[Path] = ()) -> None:
    """Run the plan, and append the rows to `path`. earlier: files of rows that are there."""
    torch.set_num_threads(1)
    engine, old_arms = Engine(load(model, "cpu")), finished([path, *earlier])
    readers = Prompts(engine, FIRST_SEED, ("full", "sekv"))
    with path.open("a") as file:
        for number, cell in enumerate(CELLS):
            start = (plan.part[0] + 7 * number) % plan.part[1]
            for index in range(start, plan.prompts if cell.name in plan.cells else 0, plan.part[1]):
                arms = [arm for arm in plan.arms if arm not in old_arms.get((cell.name, index), set())]
                for row in measure(engine, readers, cell, index, arms, index < plan.decided):
                    file.write(json.dumps(row) + "\n")
                    file.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", required=True, help="file of rows")
    parser.add_argument("--before", default="", help="files of rows that are not made again, apart by commas")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--cells", help=f"of {', '.join(cell.name for cell in CELLS)}")
    parser.add_argument("--arms", help=f"of full, {', '.join(ARMS)}; apart by semicolons")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--decided", type=int, default=30, help="prompts on which what is asked for is counted")
    arguments = parser.parse_args()
    part, parts = (int(number) for number in arguments.part.split("/"))
    cells = arguments.cells.split(",") if arguments.cells else Plan.cells
    arms = arguments.arms.split(";") if arguments.arms else Plan.arms
    earlier = [Path(name) for name in arguments.before.split(",") if name]
    plan = Plan((part, parts), cells, arms, arguments.prompts, arguments.decided)
    run_part(arguments.model, Path(arguments.rows), plan, earlier)


if __name__ == "__main__":
    main()
