"""Study files of published tables (kvlens/lab/bench/tables): the request that each stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvlens.lab.bench.quality import QualityRequest
from kvlens.lab.bench.sweep import SweepRequest
from kvlens.studies.planfile import PlanFile, read_plan

Request = TypeVar("Request", QualityRequest, SweepRequest)
TABLES = Path(__file__).parent / "tables"
"""the folder of the files; each is named as its result file"""
_PROMPTS = re.compile(
    r"(?P<task>[\w-]+)@length=(?P<length>\d+)@prompts=(?P<prompts>\d+)@seed=(?P<seed>\d+)(@depth=(?P<depth>\d+))?"
)


def quality_request(table: Path) -> QualityRequest:
    """Return the request of a quality table's study file. table: a path, or the name of a file of TABLES.

    Raises ValueError with one sentence for a file of anything else."""
    read = _read(table)
    cells = _cells(read, table)
    shared = {"length": int(cells[0]["length"]), "first_seed": int(cells[0]["seed"])}
    return _checked(QualityRequest(**_shared(read, cells), **shared), read, table)


def sweep_request(table: Path) -> SweepRequest:
    """Return the request of a sweep's study file. Arguments and errors: see `quality_request`."""
    read = _read(table)
    cells = _cells(read, table)
    lengths = tuple(dict.fromkeys(int(cell["length"]) for cell in cells))
    depths = tuple(dict.fromkeys(int(cell["depth"] or 0) / 100 for cell in cells))
    request = SweepRequest(**_shared(read, cells), lengths=lengths, depths=depths, first_seed=0)
    first_seed = int(cells[0]["seed"]) - request.seed(lengths[0], depths[0], 0)
    return _checked(request.model_copy(update={"first_seed": first_seed}), read, table)


def table_text(request: QualityRequest | SweepRequest, name: str) -> str:
    """Return the study file of a request, as `quality_request` and `sweep_request` read it."""
    plan = request.plan()
    names = "".join(f'    "{text}",\n' for text in _names(request))
    entrants = "".join(f"\n[methods.{entrant.method}]\n" for entrant in plan.entrants)
    return (
        f'name = "{name}"\nmodel = "{request.model}"\nprompts = [\n{names}]\n'
        f"budgets = {_list(request.budgets)}\nquestions = {_list(plan.questions)}\n"
        f'dtype = "{request.dtype}"\ndevice = "{request.device}"\nthreads = {plan.shared.threads}\n'
        f"reference_dtypes = {_list(plan.reference_dtypes)}\ntraces = {str(request.traces).lower()}\n"
        f'generation = "task"\n{entrants}'
    )


def _names(request: QualityRequest | SweepRequest) -> list[str]:
    """The prompts as kvlens.studies.promptfile reads them."""
    if isinstance(request, QualityRequest):
        tail = f"@length={request.length}@prompts={request.prompts}@seed={request.first_seed}"
        return [f"{task}{tail}" for task in request.tasks]
    return [
        f"{task}@length={length}@prompts={request.prompts}@seed={request.seed(length, depth, 0)}"
        f"@depth={round(100 * depth)}"
        for task in request.tasks
        for length in request.lengths
        for depth in request.depths
    ]


def _list(texts: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def _read(table: Path) -> PlanFile:
    shipped = TABLES / f"{table.name}.toml"
    return read_plan(shipped if not table.is_file() and shipped.is_file() else table)


def _cells(read: PlanFile, table: Path) -> list[dict[str, str]]:
    """What is drawn, name by name."""
    matches = [_PROMPTS.fullmatch(name) for name in read.prompts]
    cells = [match.groupdict(default="") for match in matches if match is not None]
    if len(cells) < len(matches):
        raise ValueError(f"{table.name} has prompts that no table of this command has: run it with `kvlens gate`.")
    return cells


def _shared(read: PlanFile, cells: Sequence[dict[str, str]]) -> dict[str, Any]:
    plan = read.plan
    return {
        "model": plan.shared.model,
        "methods": tuple(entrant.method for entrant in plan.entrants),
        "tasks": tuple(dict.fromkeys(cell["task"] for cell in cells)),
        "budgets": plan.budgets,
        "prompts": int(cells[0]["prompts"]),
        "question": plan.questions[0],
        "dtype": plan.shared.dtype,
        "device": plan.shared.device,
        "traces": plan.traces,
    }


def _checked(request: Request, read: PlanFile, table: Path) -> Request:
    """The request, if it is all that the file asks for."""
    plan = read.plan.model_copy(update={"name": ""})
    if sorted(_names(request)) != sorted(read.prompts) or plan != request.plan():
        raise ValueError(f"{table.name} asks for more than a table of this command is: run it with `kvlens gate`.")
    return request
