"""From the form to the command that carries a study out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlens.app.ui.common.request import as_typed
from kvlens.budget import distinct_budgets
from kvlens.runs.request import DEFAULT_SHARE, RunRequest
from kvlens.studies.plan import StudyPlan, parse_values


@dataclass(frozen=True)
class StudyChoice:
    """What the form says besides the prompts."""

    model: str
    methods: tuple[str, ...]
    budgets: tuple[str, ...] = (DEFAULT_SHARE,)
    values: Mapping[str, str] = field(default_factory=dict)
    """method.parameter -> values with commas between them"""
    questions: tuple[str, ...] = ("in",)
    max_new: int = 64
    name: str = ""
    segments: tuple[str, ...] = ()
    """NAME=MARKER or NAME=START:END, named in every prompt"""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """what the chat template is given besides messages"""
    batch: int = 1
    """prompts whose decode steps are computed together"""
    carried: bool = False
    """of conversations with several user messages, whether the first turn is placed and the others are fed to its
    cache"""

    def settings(self) -> list[str]:
        """Return the values as `kvlens study --set` takes them."""
        return [f"{target}={values}" for target, values in self.values.items()]

    def plan(self) -> StudyPlan:
        """Return the checked plan. Raises ValueError with one sentence."""
        from kvlens.runs.entrants import entrants

        plan = StudyPlan(
            name=self.name,
            shared=RunRequest(
                model=self.model, max_new=self.max_new, chat_args=dict(self.chat_args), carried=self.carried
            ),
            entrants=entrants(",".join(self.methods), [], []),
            values=parse_values(self.settings(), self.methods),
            budgets=distinct_budgets(self.budgets),
            questions=self.questions,
        )
        plan.check()
        return plan


def study_command(prompts: Sequence[str], choice: StudyChoice, runs_dir: Path) -> list[str]:
    """Return the argv that begins a study. Values are separate arguments; no shell reads them."""
    argv = [sys.executable, "-m", "kvlens", "study", *prompts, "--methods", ",".join(choice.methods)]
    argv += ["--model", choice.model, "--budgets", ",".join(choice.budgets), "--max-new", str(choice.max_new)]
    argv += ["--questions", ",".join(choice.questions), "--name", choice.name]
    for text in choice.settings():
        argv += ["--set", text]
    for item in choice.segments:
        argv += ["--segment", item]
    for name, value in choice.chat_args.items():
        argv += ["--chat-arg", as_typed(name, value)]
    if choice.carried:
        argv += ["--turns", "carried"]
    if choice.batch > 1:
        argv += ["--batch", str(choice.batch)]
    return [*argv, "--runs", str(runs_dir), "--progress-json"]


def resume_command(study_id: str, runs_dir: Path) -> list[str]:
    """Return the argv that goes on with a stored study."""
    return [sys.executable, "-m", "kvlens", "studies", "resume", study_id, "--runs", str(runs_dir), "--progress-json"]


def extend_command(study_id: str, budgets: str, values: Mapping[str, str], runs_dir: Path) -> list[str]:
    """Return the argv that adds budgets and values of parameters to a study. values: method.parameter -> values with
    commas."""
    argv = [sys.executable, "-m", "kvlens", "studies", "extend", study_id, "--budgets", budgets]
    for target, text in values.items():
        argv += ["--set", f"{target}={text}"]
    return [*argv, "--runs", str(runs_dir), "--progress-json"]
