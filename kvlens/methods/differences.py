"""What tells runs of one method apart: the settings that differ among them. One rule for lists of runs, races, studies
and Compare. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

BUDGET, QUESTION, DTYPE, SEED = "budget", "question", "dtype", "seed"
"""settings of a run besides its method's parameters"""
CONDITIONS = (BUDGET, QUESTION, DTYPE, SEED)


@dataclass(frozen=True)
class RunSettings:
    """What a run ran with, as text."""

    parameters: Mapping[str, str]
    """all parameters of the method, those that a preset chose among them"""
    requested: frozenset[str]
    """names of the parameters that a person set"""
    conditions: Mapping[str, str]
    """CONDITIONS -> value"""


def varied(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names whose values are not alike everywhere, in the order of their first mention. A name that is
    absent somewhere differs there; a number and its text are alike."""
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({str(each.get(name)) for each in settings}) > 1]


def setting_words(name: str, value: object) -> str:
    """Return a setting as a name has it: 'tau 0.9', '20%', 'question after', 'in bfloat16', 'seed 3'."""
    if name == BUDGET:
        return str(value)
    return f"in {value}" if name == DTYPE else f"{name} {value}"


def tell_apart(
    groups: Sequence[Hashable], settings: Sequence[RunSettings | None], conditions: Sequence[str] = CONDITIONS
) -> list[str]:
    """Return for each run the words of what differs among the runs of its group: 'tau 0.9, seed 3'; '' for a run that
    is alone or whose settings are unknown. A parameter is compared if a person set it in a run of the group: the values
    that presets compute follow from the prompt.

    Args:
        groups: of each run a key, such as its method; runs of one key are compared.
        settings: of each run; None: unknown.
        conditions: which of CONDITIONS are compared.
    """
    members: dict[Hashable, list[RunSettings]] = {}
    for group, run in zip(groups, settings, strict=True):
        if run is not None:
            members.setdefault(group, []).append(run)
    names = {group: _differing(runs, conditions) for group, runs in members.items()}
    return ["" if run is None else _words(run, names[group]) for group, run in zip(groups, settings, strict=True)]


def _differing(runs: Sequence[RunSettings], conditions: Sequence[str]) -> list[str]:
    requested = frozenset(name for run in runs for name in run.requested)
    return varied([_compared(run, requested, conditions) for run in runs])


def _compared(run: RunSettings, requested: frozenset[str], conditions: Sequence[str]) -> dict[str, str]:
    parameters = {name: value for name, value in run.parameters.items() if name in requested}
    return parameters | {name: run.conditions[name] for name in conditions if name in run.conditions}


def _words(run: RunSettings, names: Sequence[str]) -> str:
    values = {**run.parameters, **run.conditions}
    return ", ".join(setting_words(name, values[name]) for name in names if values.get(name))
