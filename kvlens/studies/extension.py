"""A stored study that gets more arms and prompts; what was run stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvlens import methods
from kvlens.budget import distinct_budgets
from kvlens.studies import storage
from kvlens.studies.errors import BadStudy
from kvlens.studies.plan import ListedArm, StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo

AXES = ("questions", "seeds", "reference_dtypes")
"""of a plan, besides methods, values of parameters and budgets"""


def extended(plan: StudyPlan, more: StudyPlan) -> StudyPlan:
    """Return a plan with the axes of both; what all runs share stays `plan`'s. Raises BadStudy `other_methods` where a
    method has another preset or other fixed parameters in `more`: that would change arms that were run."""
    entrants = {entrant.method: entrant for entrant in plan.entrants}
    for entrant in more.entrants:
        if entrants.setdefault(entrant.method, entrant) != entrant:
            raise BadStudy("other_methods", f"the study runs {entrant.method} with other settings: begin a new study.")
    values = {method: dict(grid) for method, grid in plan.values.items()}
    for method, grid in more.values.items():
        for name, added in grid.items():
            own_values = values.setdefault(method, {}).get(name)
            if own_values is None and any(entrant.method == method for entrant in plan.entrants):
                sentence = f"{method} has no several values of {name} in this study: begin a new study to vary it."
                raise BadStudy("other_methods", sentence)
            values[method][name] = _joined(method, name, own_values or (), added)
    axes = {name: tuple(dict.fromkeys((*getattr(plan, name), *getattr(more, name)))) for name in AXES}
    axes["budgets"] = (*plan.budgets, *distinct_budgets(more.budgets, plan.budgets))
    listed: dict[str, ListedArm] = {}
    for row in (*plan.listed, *more.listed):
        earlier = listed.get(row.arm.key())
        ids = dict.fromkeys((*(() if earlier is None else earlier.prompts), *row.prompts))
        listed[row.arm.key()] = ListedArm(arm=row.arm, prompts=tuple(ids))
    lists = {"entrants": tuple(entrants.values()), "listed": tuple(listed.values())}
    return plan.model_copy(update={**lists, "values": values, **axes})


def _joined(method: str, name: str, own_values: Sequence[Any], added: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values of both, each once, whether it is written as a text or as a number; the stored form stays."""
    kind = methods.get(method)
    joined = {methods.converted(kind, {name: value})[name]: value for value in (*added, *own_values)}
    ordered = dict.fromkeys(methods.converted(kind, {name: value})[name] for value in (*own_values, *added))
    return tuple(joined[value] for value in ordered)


def extend(
    runs_dir: Path,
    study_id: str,
    more: StudyPlan,
    prompts: Sequence[StudyPrompt],
    key: Callable[[StudyPrompt], Hashable] = attrgetter("content"),
) -> StudyInfo:
    """Add arms and prompts to a stored study, and return it; its trials stay. A prompt that it has already is left out.

    Args:
        key: prompts of one key are one prompt.

    Raises StudyBusy while a process carries it out, BadStudy `other_methods`, TraceError.
    """
    with storage.carried_out_alone(runs_dir, study_id):
        info = storage.read(runs_dir, study_id)
        info = info.model_copy(update={"plan": extended(info.plan, more)})
        info.plan.check()
        stored_prompts = storage.read_prompts(runs_dir, study_id)
        keys, ids = {key(prompt) for prompt in stored_prompts}, {prompt.id for prompt in stored_prompts}
        for prompt in prompts:
            if key(prompt) not in keys:
                name = next(name for name in _names(prompt.id) if name not in ids)
                ids.add(name)
                stored_prompts.append(replace(prompt, id=name))
        storage.write_prompts(storage.folder_of(runs_dir, study_id), stored_prompts)
        storage.save(runs_dir, info)
        return info


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}#{number}" for number in itertools.count(2))
