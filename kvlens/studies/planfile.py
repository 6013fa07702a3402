"""A study as a TOML file: prompts, methods with their parameters, budgets, and the thresholds of a gate."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens import tasks
from kvlens.budget import distinct_budgets
from kvlens.runs.races import Entrant
from kvlens.runs.request import DEFAULT_SHARE, RunRequest
from kvlens.studies.errors import BadStudy
from kvlens.studies.limits import Thresholds
from kvlens.studies.plan import StudyPlan
from kvlens.studies.planfaults import Faults

FORMS = ("reference_dtypes", "traces", "generation", "listed")
"""keys of the file that say how the trials are run (kvlens.studies.plan.StudyPlan)"""
AXES = ("name", "prompts", "segments", "methods", "budgets", "questions", "seeds", *FORMS, "gate")
"""keys of the file that are no setting of a run"""
SETTINGS = (
    "model",
    "max_new",
    "temperature",
    "top_p",
    "stop",
    "ignore_eos",
    "chat",
    "system",
    "chat_args",
    "device",
    "dtype",
    "prefill_chunk",
    "trace_level",
    "coverage",
    "oracle",
    "threads",
)
"""keys of the file that all runs share (kvlens.runs.request.RunRequest)"""


@dataclass(frozen=True)
class PlanFile:
    """What a file asks for."""

    plan: StudyPlan
    prompts: tuple[str, ...]
    """names, as kvlens.studies.promptfile.read_prompts takes them"""
    thresholds: Thresholds
    segments: tuple[tuple[str, Any], ...] = ()
    """(name, marker or range), named in every prompt"""


def read_plan(path: Path) -> PlanFile:
    """Return the study of a TOML file. Files of prompts are searched beside it first.

    Raises BadStudy `bad_plan_file`, which names all faults of keys and values at once, and what StudyPlan.check raises.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadStudy("bad_plan_file", f"there is no file '{path}'.") from None
    except (OSError, ValueError) as error:
        raise BadStudy("bad_plan_file", f"{path.name} is no TOML file ({error}).") from None
    faults = Faults(path.name)
    for key in data:
        if key not in (*AXES, *SETTINGS):
            faults.add(key, f"'{key}' is no key of a study; there are {', '.join((*AXES, *SETTINGS))}")
    prompts = _texts(data, "prompts", ())
    if not prompts:
        faults.add("prompts", "the file names no prompts: add prompts = [...]")
    entrants, values = _methods(data.get("methods"))
    segments = tuple(_table(data.get("segments"), "[segments]").items())
    gate = _table(data.get("gate"), "[gate]")
    shared, thresholds, plan = RunRequest(), Thresholds(), None
    with faults.gathered():
        shared = RunRequest(**{name: data[name] for name in SETTINGS if name in data})
    with faults.gathered("gate"):
        thresholds = Thresholds.model_validate(gate)
    with faults.gathered():
        plan = StudyPlan(
            name=str(data.get("name", "")),
            shared=shared,
            entrants=entrants,
            values=values,
            budgets=distinct_budgets(_texts(data, "budgets", (DEFAULT_SHARE,))),
            questions=_texts(data, "questions", ("in",)),
            seeds=tuple(_list(data, "seeds", (0,))),
            **{name: data[name] for name in FORMS if name in data},
        )
    faults.check()
    assert plan is not None, "a plan that cannot be made is a fault"
    plan.check()
    return PlanFile(plan, tuple(_beside(path, name) for name in prompts), thresholds, segments)


def _methods(table: Any) -> tuple[tuple[Entrant, ...], dict[str, dict[str, tuple[Any, ...]]]]:
    """The methods, each with what is the same in all its arms, and the values of parameters that vary."""
    entrants, values = [], {}
    for name, each in _table(table, "[methods.NAME]").items():
        parameters = dict(_table(each, f"[methods.{name}]"))
        preset = parameters.pop("preset", None)
        varied = {key: tuple(value) for key, value in parameters.items() if isinstance(value, list)}
        fixed = {key: value for key, value in parameters.items() if key not in varied}
        entrants.append(Entrant(method=name, preset=preset, overrides=fixed))
        if varied:
            values[name] = varied
    return tuple(entrants), values


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict | None):
        raise BadStudy("bad_plan_file", f"{name} is no table of the file.")
    return value or {}


def _list(data: Mapping[str, Any], key: str, usual: Sequence[Any]) -> Sequence[Any]:
    value = data.get(key, usual)
    return value if isinstance(value, list | tuple) else [value]


def _texts(data: Mapping[str, Any], key: str, usual: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(value) for value in _list(data, key, usual))


def _beside(path: Path, name: str) -> str:
    """The name of a file beside the plan's, where there is one of that name; else the name as it is."""
    if (path.parent / name).is_file():
        return str(path.parent / name)
    kind, colon, rest = name.partition(":")
    if colon and kind in tasks.file_kinds() and (path.parent / rest.partition("@")[0]).is_file():
        return f"{kind}:{path.parent / rest}"
    return name
