"""The arms of statements, measured on the same prompts: answers on generated tasks, KL on passages of real text. One
line per trial may be kept, so that a measurement that was ended goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvlens import methods, tasks
from kvlens.bench import freetext, kept
from kvlens.bench.freetext import FreeTextRequest, Passages, apart
from kvlens.bench.provenance import origin
from kvlens.bench.trials import DEPTHS, Prompts, Trial, arm, changed, chosen, header, infeasible, outcome
from kvlens.engine.engine import Options
from kvlens.memory.budget import Budget, BudgetInfeasible
from kvlens.methods.statements import FIGURES, SHORT, Arm, Statement
from kvlens.rows import PrefillRecord, StepRecord

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

FIRST_SEED = 9_400_000
"""of no other measurement"""
LENGTH = 1024
"""tokens of a prompt, and of a passage's context"""
ANSWER = 24
"""tokens generated at most: an answer begins with what was asked for, as its first words are fed. Budgets are divided
for as many as the task generates"""
TEXT = "text"
"""begins what stands for the task where a passage is fed"""
NEEDED = ("key", "arm", "method", "origin")

Place = tuple[str, str, int]
"""task, or TEXT with its lengths; question; index of the prompt or passage"""
Rows = dict[tuple[Arm, Place], dict[str, Any]]
"""what came of an arm on a prompt, as kvlens.bench.trials and kvlens.bench.freetext write it"""
Wanted = dict[Place, dict[Arm, bool]]
"""arms by place, and whether coverage is measured"""


def places(statement: Statement, prompts: int) -> list[Place]:
    """On what a statement is tried: prompts of each task, or passages that share no text. Raises ValueError where the
    text has not so many."""
    if FIGURES[statement.figure].of_text:
        context, fed = statement.text
        return [(f"{TEXT} {context}+{fed}", "in", at) for at in apart(FIRST_SEED, prompts, sum(SHORT))]
    return [(task, statement.question, index) for index in range(prompts) for task in statement.tasks]


def wanted(statements: Iterable[Statement], prompts: int) -> Wanted:
    """Every arm of the statements on each of its places."""
    found: Wanted = {}
    for statement in statements:
        for place in places(statement, prompts):
            for one in statement.arms:
                covered = found.setdefault(place, {}).get(one, False)
                found[place][one] = covered or statement.figure == "coverage"
    return found


@kept.alone
def measure(asked: Wanted, file: Path, engine: Engine, report: Callable[[str], None]) -> Rows:
    """What is asked for, prompt by prompt, so that all arms read it once. file: where trials are kept; those that are
    there and were made by the same code are not run again. Raises ValueError for a file of something else."""
    names = sorted({one.method for arms in asked.values() for one in arms})
    model = engine.loaded.name
    origins = {name: _origin(model, name) for name in names}
    rows = _kept(file, asked, origins)
    total, done = sum(map(len, asked.values())), len(rows)
    reading, passages = Prompts(engine, FIRST_SEED, names), dict[str, Passages]()
    for place in sorted(asked, key=lambda place: (place[2], place)):
        for one, coverage in asked[place].items():
            if (one, place) in rows:
                continue
            if place[0].startswith(TEXT):
                if place[0] not in passages:
                    passages[place[0]] = _passages(engine, place[0], names)
                passages[place[0]].turn(place[2])
                row = passages[place[0]].run(one.method, one.budget, changes=dict(one.changes))
            else:
                row = answered(engine, reading, one, place, coverage)
            rows[one, place] = row
            known = {"key": _key(one, place), "arm": _words(one), "origin": origins[one.method]}
            kept.append(file, row | known | {"method": one.method})
            done += 1
            report(f"{done}/{total} {_key(one, place)}")
    return rows


def _passages(engine: Engine, place: str, names: Sequence[str]) -> Passages:
    context, fed = map(int, place.removeprefix(TEXT).split("+"))
    request = FreeTextRequest(
        model=engine.loaded.name, methods=tuple(names), first_seed=FIRST_SEED, length=context, tokens=fed
    )
    return Passages(request, engine)


class Steps:
    """A sink that keeps what statements need of every step."""

    def __init__(self, coverage: bool) -> None:
        self.covers = coverage
        self.coverage: list[float] = []
        self.read: list[float] = []

    def prefill(self, record: PrefillRecord) -> None:
        """Nothing to keep."""

    def step(self, record: StepRecord) -> None:
        self.read.append(float(record.kv["read_bytes"].sum()))
        if self.covers:
            self.coverage.append(float(record.head["coverage"].mean()))


def answered(engine: Engine, reading: Prompts, one: Arm, place: Place, coverage: bool) -> dict[str, Any]:
    """One prompt of a task under an arm: `exact`, `coverage` where asked for, shares of full KV; `infeasible` (the
    smallest feasible share) where the budget cannot be kept, `refused` (a sentence) where the method cannot be run on
    the model."""
    task, question, index = place
    seed, depth = FIRST_SEED + index, DEPTHS[index % len(DEPTHS)]
    trial = Trial(task, LENGTH, depth, seed, index, one.method, one.budget, question)
    asked, prompt, method = reading.asked(trial), reading.prompt(trial), methods.get(one.method)
    row, planned = header(trial, engine.loaded.name), tasks.get(task).generation(index).new_tokens
    limit = Budget.parse(one.budget) if row["rule"] == "resident bytes" else None
    options = Options(max_new=min(ANSWER, planned), planned=planned, coverage=coverage, oracle="off")
    sink = Steps(coverage)
    try:
        found = changed(method, chosen(engine, prompt, method, row, limit, options), dict(one.changes))
        row |= arm(found, row)
        result = engine.run(prompt, method, found.params, limit, options, sink, read=reading.read(trial, method))
    except BudgetInfeasible as error:
        return row | infeasible(error)
    except ValueError as error:
        return row | {"refused": str(error)}
    full = engine.loaded.shape.full_kv_bytes(len(prompt.ids) + len(prompt.asked) + planned)
    return row | {
        "exact": outcome(asked, result.text)["exact"],
        "coverage": fmean(sink.coverage) if coverage else None,
        "resident_share": result.peak_bytes / full,
        "read_share": fmean(sink.read) / full,
        "passed": all(check.passed for check in result.checks),
    }


def _words(one: Arm) -> str:
    return "/".join((one.method, one.budget, ",".join(f"{name}={value}" for name, value in one.changes)))


def _key(one: Arm, place: Place) -> str:
    """By which a trial is known again."""
    return "/".join((*map(str, place), _words(one)))


def _origin(model: str, name: str) -> str:
    own = hashlib.sha256(Path(freetext.__file__).read_bytes() + Path(__file__).read_bytes()).hexdigest()
    return origin(model, name, FIRST_SEED, LENGTH, own)


def _kept(file: Path, asked: Wanted, origins: Mapping[str, str]) -> Rows:
    """Trials of earlier calls that are asked for and comparable."""
    known = {_key(one, place): (one, place) for place, arms in asked.items() for one in arms}
    found: Rows = {}
    for row in kept.read(file, NEEDED, lambda row: row["key"] in known):
        one, place = known[row["key"]]
        enough = row.get("coverage") is not None or not asked[place][one] or "exact" not in row
        if row["origin"] == origins[one.method] and enough:
            found[one, place] = row
    return found
