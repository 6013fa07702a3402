"""A study's results: one row per trial, one row per arm with n and intervals, and curves over any numeric axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvlens import methods
from kvlens.budget import Budget
from kvlens.statistics import of_mean, wilson
from kvlens.studies import storage
from kvlens.studies.errors import BadStudy
from kvlens.studies.figures import FIGURES
from kvlens.studies.plan import Arm, labels
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo, Trial

SHARES = ("right", "cut_off", "same_output")
"""figures that are yes or no of a trial: their mean over prompts is a share with Wilson's interval"""
AXES = ("budget", "prompt_tokens")
"""numeric axes of every study; parameters with numbers for values are more"""


@dataclass(frozen=True)
class Results:
    """A study with the trials that have ended so far."""

    info: StudyInfo
    prompts: Sequence[StudyPrompt]
    trials: Sequence[Trial]

    @classmethod
    def read(cls, runs_dir: Path, study_id: str) -> Results:
        """Return what is stored. Raises TraceError with one sentence."""
        info = storage.read(runs_dir, study_id)
        return cls(info, storage.read_prompts(runs_dir, study_id), storage.read_trials(runs_dir, study_id))

    def of_group(self, group: str) -> Results:
        """Return the same study with the prompts of one group alone."""
        prompts = [prompt for prompt in self.prompts if prompt.group == group]
        ids = {prompt.id for prompt in prompts}
        return Results(self.info, prompts, [trial for trial in self.trials if trial.prompt in ids])

    @property
    def arms(self) -> list[Arm]:
        """All arms of the plan, full KV's first."""
        return self.info.plan.arms()

    @property
    def labels(self) -> dict[str, str]:
        """Arm key -> what the arm is called."""
        return labels(self.arms, self.info.plan.shared.model)

    def arm(self, name: str) -> Arm:
        """Return an arm by its key or label. Raises BadStudy `unknown_arm`."""
        names = self.labels
        matching = [arm for arm in self.arms if name in (arm.key(), names[arm.key()])]
        if len(matching) != 1:
            raise BadStudy("unknown_arm", f"the study has no arm '{name}'; it has {', '.join(names.values())}.")
        return matching[0]

    @property
    def planned(self) -> int:
        """Trials of the whole study."""
        return len(self.info.plan.trials(prompt.id for prompt in self.prompts))

    @property
    def ended(self) -> int:
        """Trials that have ended and are not run again."""
        return sum(trial.ended for trial in self.trials)

    def frame(self) -> pd.DataFrame:
        """Return one row per trial: prompt, group, arm (its key), label, method, preset, budget, question, seed, every
        parameter that some arm sets, state, uid, message, and the figures of kvlens.studies.figures."""
        arms = {arm.key(): arm for arm in self.arms}
        names, groups = self.labels, {prompt.id: prompt.group for prompt in self.prompts}
        rows = [
            {
                "prompt": trial.prompt,
                "group": groups.get(trial.prompt, ""),
                "arm": trial.arm,
                "label": names[trial.arm],
                **_columns(arms[trial.arm]),
                "state": trial.state,
                "uid": trial.uid,
                "message": trial.message,
                **_flat(trial.figures or {}),
            }
            for trial in self.trials
            if trial.arm in arms and trial.prompt in groups
        ]
        return pd.DataFrame(
            rows, columns=None if rows else ["prompt", "group", "arm", "label", "state", "uid", "message"]
        )

    def matrix(self, group: str | None = None) -> pd.DataFrame:
        """Return one row per arm, in the plan's order: its settings, ran_preset (the presets that its trials ran with),
        n (prompts judged), right, right_low, right_high (95 % Wilson), same_output, refused and failed (trials), and
        the mean of every other figure over its trials.

        Args:
            group: only the prompts of this group; None: all.
        """
        frame = self.frame()
        if group is not None and len(frame):
            frame = frame[frame["group"] == group]
        names = self.labels
        rows = []
        for arm in self.arms:
            part = frame[frame["arm"] == arm.key()] if len(frame) else frame
            rows.append({"arm": arm.key(), "label": names[arm.key()], **_columns(arm), **_summary(part)})
        return pd.DataFrame(rows)

    def axes(self) -> list[str]:
        """Return the numeric axes along which the study has at least two values: parameters, budget, prompt_tokens."""
        frame = pd.DataFrame([_columns(arm) for arm in self.arms if arm.method != methods.REFERENCE])
        fixed = {"method", "preset", "question", "seed"}
        names = [name for name in frame.columns if name not in fixed and frame[name].map(_number).nunique() > 1]
        lengths = {trial.figures.get("prompt_tokens") for trial in self.trials if trial.figures}
        names.sort(key=lambda name: name == "budget")
        return [*names, *(["prompt_tokens"] if len(lengths) > 1 else [])]

    def curve(self, axis: str, figure: str = "right") -> pd.DataFrame:
        """Return a figure along a numeric axis, one line for whatever else the arms differ in.

        Args:
            axis: "budget" (a share of full KV), "prompt_tokens", or a parameter.
            figure: one of kvlens.studies.figures.FIGURES.

        Returns: line, method, x, ran_preset (of the point's trials), n, value, low, high (95 %; NaN where there are too
        few trials), uids (of the runs).
        Raises ValueError with one sentence for an axis or a figure that the study does not have.
        """
        if figure not in FIGURES:
            raise BadStudy("unknown_figure", f"a study has no figure '{figure}'; it has {', '.join(FIGURES)}.")
        if axis not in self.axes():
            raise BadStudy(
                "unknown_axis",
                f"the study has one value of '{axis}' or none; it varies {', '.join(self.axes()) or 'nothing'}.",
            )
        frame = self.frame()
        empty = pd.DataFrame(columns=["line", "method", "x", "ran_preset", "n", "value", "low", "high", "uids"])
        if figure not in frame:
            return empty
        completed = frame[
            (frame["state"] == "completed") & (frame["method"] != methods.REFERENCE) & frame[figure].notna()
        ]
        completed = completed.assign(x=completed[axis].map(_number), line=self._lines(completed, axis))
        rows = []
        for (line, method, x), part in completed[completed["x"].notna()].groupby(["line", "method", "x"], sort=False):
            value, low, high = estimated(part[figure], figure)
            rows.append((line, method, x, _presets(part), len(part), value, low, high, list(part["uid"])))
        points = pd.DataFrame(rows, columns=empty.columns)
        return points.sort_values(["line", "x"], kind="stable").reset_index(drop=True) if len(points) else empty

    def _lines(self, frame: pd.DataFrame, axis: str) -> pd.Series:
        """The name of each trial's line: its arm without the axis."""
        arms = {arm.key(): _without(arm, axis) for arm in self.arms}
        names = labels(list(arms.values()), self.info.plan.shared.model)
        return frame["arm"].map(lambda key: names[arms[key].key()])


def estimated(values: Iterable[Any], figure: str) -> tuple[float, float, float]:
    """Return (mean, low, high) of a figure over prompts, with the 95 % interval: Wilson's of a share, Student's of a
    mean (NaN bounds for fewer than six). No figure is negative, so that no bound is."""
    numbers = [float(value) for value in values]
    mean = sum(numbers) / len(numbers)
    if figure in SHARES:
        return mean, *wilson(mean, len(numbers))
    low, high = of_mean(numbers) or (math.nan, math.nan)
    return mean, max(0.0, low) if low == low else low, high


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as cells of a table: a list of words is one text, and so is what a preset chose."""
    cells: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, list):
            value = " ".join(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key}={item}" for key, item in value.items())
        cells[name] = value
    return cells


def _columns(arm: Arm) -> dict[str, Any]:
    fixed = {"method": arm.method, "preset": arm.preset or "", "budget": arm.budget}
    return {**fixed, "question": arm.question, "seed": arm.seed, **arm.parameters}


def _without(arm: Arm, axis: str) -> Arm:
    if axis == "budget":
        return arm.model_copy(update={"budget": ""})
    rest = {
        field: {name: value for name, value in values.items() if name != axis}
        for field, values in (("overrides", arm.overrides), ("changes", arm.changes))
    }
    return arm.model_copy(update=rest)


def _number(value: Any) -> float | None:
    """A value on an axis: a budget's share, or the number that a parameter is set to; None for anything else."""
    text = str(value)
    if isinstance(value, bool) or not text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(Budget.parse(text).amount)
    except ValueError:
        return None


def _presets(part: pd.DataFrame) -> str:
    """Return the presets that trials ran with, 'fit and paper'; '' where none is known."""
    values = part["ran_preset"].dropna() if "ran_preset" in part else ()
    return " and ".join(sorted({str(value) for value in values}))


def _summary(part: pd.DataFrame) -> Mapping[str, Any]:
    states = part["state"] if len(part) else pd.Series([], dtype=object)
    completed = part[states == "completed"] if len(part) else part
    row: dict[str, Any] = {
        "ran_preset": _presets(completed),
        "n": 0,
        "refused": int((states == "refused").sum()),
        "failed": int((states == "failed").sum()),
    }
    for figure in FIGURES:
        values = completed[figure].dropna() if figure in completed else ()
        if not len(values):
            row[figure] = math.nan
            continue
        mean, low, high = estimated(values, figure)
        row[figure] = mean
        if figure == "right":
            row |= {"n": len(values), "right_low": low, "right_high": high}
    return row
