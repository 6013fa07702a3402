"""What a study is to run: methods x values of parameters x budgets x forms of the question x seeds, over prompts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvlens import methods
from kvlens.budget import Budget, in_words
from kvlens.methods.differences import BUDGET, DTYPE, QUESTION, SEED, setting_words, varied
from kvlens.methods.naming import preset_name
from kvlens.runs.races import Entrant, RaceRequest
from kvlens.runs.request import DEFAULT_SHARE, RunRequest, Seed, default_preset
from kvlens.studies.armchecks import check_arm
from kvlens.studies.errors import BadStudy
from kvlens.text.prompts import QUESTIONS

LATER = ("dtype", "changes")
"""fields of an arm that its key leaves out where they are empty: studies were keyed before an arm had them"""


class Arm(BaseModel):
    """One configuration that every prompt of a study is run under."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    preset: str | None = None
    overrides: dict[str, Any] = {}
    """parameters of the method that differ from the preset's"""
    budget: str = ""
    """what the method is held to; '' for full KV"""
    question: str = "in"
    seed: int = 0
    dtype: str = ""
    """number format, where it is not the study's own: what rounding alone changes"""
    changes: dict[str, Any] = {}
    """parameters that are set after the preset was chosen, so that two arms differ in nothing else"""

    def key(self) -> str:
        """Return 12 hex digits that name the whole configuration."""
        fields = self.model_dump(mode="json")
        for name in LATER:
            if not fields[name]:
                del fields[name]
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def settings(self) -> dict[str, str]:
        """Return all that is set, by name, as text; parameters by their own names."""
        fields = {
            "method": self.method,
            "preset": self.preset or "",
            "budget": self.budget,
            "question": self.question,
            "seed": str(self.seed),
            "dtype": self.dtype,
        }
        return fields | {name: str(value) for name, value in self.parameters.items()}

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters that are set."""
        return {**self.overrides, **self.changes}


class ListedArm(BaseModel):
    """An arm that some prompts alone are run under."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: Arm
    prompts: tuple[str, ...]
    """their ids"""


class StudyPlan(BaseModel):
    """The trials of a study: axes, a list of arms with their prompts, or both. Every combination of the axes is an arm
    of all prompts; full KV is one more, for each form of the question and seed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: str = ""
    shared: RunRequest
    """what all runs have in common: model, number format, tokens at most, chat form, level of the trace"""
    entrants: tuple[Entrant, ...]
    """methods, each with a preset and the parameters that are the same in all its arms"""
    values: dict[str, dict[str, tuple[Any, ...]]] = {}
    """method -> parameter -> the values that it takes"""
    budgets: tuple[str, ...] = (DEFAULT_SHARE,)
    questions: tuple[str, ...] = ("in",)
    seeds: tuple[Seed, ...] = (0,)
    reference_dtypes: tuple[str, ...] = ()
    """number formats in which full KV is run once more: the noise floor"""
    traces: bool = True
    """every trial is a stored run; without, figures alone are kept, and no trial is compared with full KV step by
    step"""
    generation: Literal["shared", "task", "cut"] = "shared"
    """task: tokens at most, temperature, top-p and seed are those of each prompt's task; cut: so, but an answer ends
    after the shared number of tokens at most, and budgets are divided for as many as the task generates"""
    listed: tuple[ListedArm, ...] = ()
    """arms of some prompts alone; a study without methods is of these alone, and full KV is run where it is listed"""

    def check(self) -> None:
        """Raise ValueError with one sentence for no method, unknown names, values and presets, and for values that a
        method or a budget cannot have."""
        if self.generation == "cut" and self.traces:
            raise BadStudy("cut_is_stored", "generation = cut needs traces = false: a stored run is not cut.")
        if not self.entrants and not self.listed:
            raise BadStudy("no_method", "a study needs at least one method: name some with --methods.")
        for axis in ("budgets", "questions", "seeds"):
            if not getattr(self, axis):
                raise BadStudy("no_values", f"a study needs at least one of its {axis}: name some with --{axis}.")
        for question in self.questions:
            if question not in QUESTIONS:
                choice = " or ".join(QUESTIONS)
                raise BadStudy("bad_values", f"--questions takes {choice}, or both, not '{question[:40]}'.")
        names = [entrant.method for entrant in self.entrants]
        for name in self.values:
            if name not in names:
                raise BadStudy(
                    "foreign_parameter", f"the study sets a parameter of {name}, which is none of its methods."
                )
        for budget in (*self.budgets, *(row.arm.budget for row in self.listed if row.arm.budget)):
            Budget.parse(budget)
        for arm in self.arms():
            check_arm(self.request(arm), arm.changes)

    def check_listed(self, prompts: Iterable[str]) -> None:
        """Raise BadStudy `unknown_prompt` for an arm that is listed with a prompt that is none of these ids."""
        ids = set(prompts)
        for row in self.listed:
            for prompt in row.prompts:
                if prompt not in ids:
                    raise BadStudy(
                        "unknown_prompt",
                        f"the study lists the prompt '{prompt[:60]}', which is none of its {len(ids)}: list an id.",
                    )

    def arms(self) -> list[Arm]:
        """Return all arms, each once: those of full KV first, those of listed prompts last."""
        arms = {arm.key(): arm for arm in self._combined()}
        return list((arms | {row.arm.key(): row.arm for row in self.listed}).values())

    def trials(self, prompts: Iterable[str]) -> list[tuple[str, str]]:
        """Return (prompt, key of an arm) of every trial, prompt by prompt. prompts: ids, in the order of the study."""
        everywhere = dict.fromkeys(arm.key() for arm in self._combined())
        keys_by_prompt: dict[str, dict[str, None]] = {prompt: dict(everywhere) for prompt in prompts}
        for row in self.listed:
            key = row.arm.key()
            for prompt in row.prompts:
                if prompt in keys_by_prompt:
                    keys_by_prompt[prompt][key] = None
        return [(prompt, key) for prompt, keys in keys_by_prompt.items() for key in keys]

    def _combined(self) -> list[Arm]:
        """Every combination of the axes, each once."""
        arms: dict[str, Arm] = {}
        if not self.entrants:
            return []
        for question, seed in itertools.product(self.questions, self.seeds):
            for dtype in ("", *self.reference_dtypes):
                arm = Arm(method=methods.REFERENCE, question=question, seed=seed, dtype=dtype)
                arms[arm.key()] = arm
        for entrant in self.entrants:
            if entrant.method == methods.REFERENCE:
                continue
            grid = self.values.get(entrant.method, {})
            places = itertools.product(*grid.values())
            for values, budget, question, seed in itertools.product(places, self.budgets, self.questions, self.seeds):
                overrides = {**entrant.overrides, **dict(zip(grid, values, strict=True))}
                shares = {"overrides": overrides, "budget": budget, "question": question, "seed": seed}
                arm = Arm(method=entrant.method, preset=entrant.preset, **shares)
                arms[arm.key()] = arm
        return list(arms.values())

    def request(self, arm: Arm) -> RunRequest:
        """Return the run of an arm. Its budget holds a method that keeps all KV to that share of the tokens it attends,
        where it has a parameter for it, as races and benchmarks do."""
        changes = {"budget": arm.budget or None, "question": arm.question, "seed": arm.seed}
        if arm.dtype:
            changes["dtype"] = arm.dtype
        shared = self.shared.model_copy(update=changes)
        if arm.method == methods.REFERENCE:
            return RaceRequest(shared=shared, entrants=()).reference
        entrant = Entrant(method=arm.method, preset=arm.preset, overrides=arm.overrides)
        return RaceRequest(shared=shared, entrants=(entrant,)).lanes()[0][0]


def parse_values(items: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return ['METHOD.NAME=0.7,0.8'] as {'METHOD': {'NAME': ('0.7', '0.8')}}. names: the study's methods. A parameter
    without a method belongs to the only one. Raises ValueError with one sentence."""
    values_by_method: dict[str, dict[str, tuple[str, ...]]] = {}
    for item in items:
        target, sign, values = item.partition("=")
        method, dot, parameter = target.strip().rpartition(".")
        if not dot and len(names) == 1:
            method = names[0]
        parts = tuple(part.strip() for part in values.split(",") if part.strip())
        if not sign or method not in names or not parameter or not parts:
            raise BadStudy(
                "bad_values", f"--set takes method.parameter=value,value of a method of the study, not '{item}'."
            )
        grid = values_by_method.setdefault(method, {})
        if parameter in grid:
            sentence = f"--set {method}.{parameter} is given twice: give all its values once, with commas between them."
            raise BadStudy("bad_values", sentence)
        grid[parameter] = parts
    return values_by_method


def labels(arms: Sequence[Arm], model: str) -> dict[str, str]:
    """Return arm key -> a name that says the method, what of it is a stand-in on this model, and whatever tells the arm
    from the study's other arms."""
    settings = [arm.settings() for arm in arms if arm.method != methods.REFERENCE]
    shared = set(varied([{name: each[name] for name in (BUDGET, QUESTION, SEED)} for each in settings]))
    return {arm.key(): _label(arm, model, settings, shared) for arm in arms}


def _label(arm: Arm, model: str, settings: Sequence[Mapping[str, str]], shared: set[str]) -> str:
    arm_settings = arm.settings()
    differing = set(varied([each for each in settings if each["method"] == arm.method]))
    usual = default_preset(arm.method, model)
    parts = [preset_name(arm.method, arm.preset or usual, arm.parameters, usual)]
    if "preset" in differing:
        parts.append(arm_settings["preset"] or "usual preset")
    parts += [setting_words(name, arm_settings[name]) for name in arm.parameters if name in differing]
    if BUDGET in shared and arm.budget:
        parts.append(setting_words(BUDGET, in_words(arm.budget)))
    parts += [setting_words(name, arm_settings[name]) for name in (QUESTION, SEED) if name in shared]
    if arm.dtype:
        parts.append(setting_words(DTYPE, arm.dtype))
    return " ".join(parts)
