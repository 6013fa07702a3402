"""The arms of statements, measured on the same prompts: answers on generated tasks, KL on passages of real text. One
line per trial may be kept, so that a measurement that was ended goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import getfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.lab.bench import freetext, kept
from kvlens.lab.bench.freetext import FreeTextRequest, Passages
from kvlens.lab.bench.passages import apart
from kvlens.lab.bench.provenance import origin
from kvlens.lab.bench.trialprompts import DEPTHS, Prompts, Trial
from kvlens.lab.bench.trials import carry_out
from kvlens.methods.statements import FIGURES, SHORT, Arm, Statement

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
"""what came of an arm on a prompt, as kvlens.lab.bench.trials and kvlens.lab.bench.freetext write it"""
Wanted = dict[Place, dict[Arm, None]]
"""arms by place, each once"""


def places(statement: Statement, prompts: int) -> list[Place]:
    """On what a statement is tried: prompts of each task, or passages that share no text. Raises ValueError where the
    text has not so many."""
    if FIGURES[statement.figure].of_text:
        context, fed = statement.text
        return [(f"{TEXT} {context}+{fed}", "in", place) for place in apart(FIRST_SEED, prompts, sum(SHORT))]
    return [(task, statement.question, index) for index in range(prompts) for task in statement.tasks]


def list_arms(statements: Iterable[Statement], prompts: int) -> Wanted:
    """Every arm of the statements on each of its places."""
    arms_by_place: Wanted = {}
    for statement in statements:
        for place in places(statement, prompts):
            arms_by_place.setdefault(place, {}).update(dict.fromkeys(statement.arms))
    return arms_by_place


@kept.alone
def measure(arms_by_place: Wanted, file: Path, engine: Engine, report: Callable[[str], None]) -> Rows:
    """What is asked for, prompt by prompt, so that all arms read it once. file: where trials are kept; those that are
    there and were made by the same code are not run again. Raises ValueError for a file of something else."""
    names = sorted({arm.method for arms in arms_by_place.values() for arm in arms})
    model = engine.loaded.name
    origins = {name: _origin(model, name) for name in names}
    rows = _read_kept(file, arms_by_place, origins)
    total, count = sum(map(len, arms_by_place.values())), len(rows)
    reading, passages = Prompts(engine, FIRST_SEED, names), dict[str, Passages]()
    for place in sorted(arms_by_place, key=lambda place: (place[2], place)):
        for arm in arms_by_place[place]:
            if (arm, place) in rows:
                continue
            if place[0].startswith(TEXT):
                if place[0] not in passages:
                    passages[place[0]] = _passages(engine, place[0], names)
                passages[place[0]].turn(place[2])
                row = passages[place[0]].run(arm.method, arm.budget, changes=dict(arm.changes))
            else:
                row = carry_out(engine, reading, _trial(arm, place), dict(arm.changes), ANSWER)
            rows[arm, place] = row
            identity = {"key": _key(arm, place), "arm": _words(arm), "origin": origins[arm.method]}
            kept.append(file, row | identity | {"method": arm.method})
            count += 1
            report(f"{count}/{total} {_key(arm, place)}")
    return rows


def _passages(engine: Engine, place: str, names: Sequence[str]) -> Passages:
    context, fed = map(int, place.removeprefix(TEXT).split("+"))
    request = FreeTextRequest(
        model=engine.loaded.name, methods=tuple(names), first_seed=FIRST_SEED, length=context, tokens=fed
    )
    return Passages(request, engine)


def _trial(arm: Arm, place: Place) -> Trial:
    task, question, index = place
    depth, seed = DEPTHS[index % len(DEPTHS)], FIRST_SEED + index
    return Trial(task, LENGTH, depth, seed, index, arm.method, arm.budget, question)


def _words(arm: Arm) -> str:
    return "/".join((arm.method, arm.budget, ",".join(f"{name}={value}" for name, value in arm.changes)))


def _key(arm: Arm, place: Place) -> str:
    """By which a trial is known again."""
    return "/".join((*map(str, place), _words(arm)))


def _origin(model: str, name: str) -> str:
    sources = freetext.__file__, getfile(apart), __file__
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()
    return origin(model, name, FIRST_SEED, LENGTH, digest)


def _read_kept(file: Path, arms_by_place: Wanted, origins: Mapping[str, str]) -> Rows:
    """Trials of earlier calls that are asked for and comparable."""
    trials = {_key(arm, place): (arm, place) for place, arms in arms_by_place.items() for arm in arms}
    stored_rows = kept.read(file, NEEDED, lambda row: row["key"] in trials)
    return {trials[row["key"]]: row for row in stored_rows if row["origin"] == origins[trials[row["key"]][0].method]}
