"""The arms of statements as a study: answers on generated tasks, KL on passages of real text. An arm is run on the
prompts of its statements alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvlens.budget import WHOLE
from kvlens.lab.bench.passages import apart, split_text
from kvlens.lab.bench.tablestudy import Measured, carry_out_table
from kvlens.lab.bench.trialprompts import DEPTHS
from kvlens.methods import REFERENCE
from kvlens.methods.statements import FIGURES, SHORT, Arm, Statement
from kvlens.models.device import CPU
from kvlens.runs.request import RunRequest
from kvlens.studies import plan as studies
from kvlens.studies.promptrow import StudyPrompt, task_prompt
from kvlens.tasks.encoding import encoding
from kvlens.text.prompts import PromptText
from kvlens.workers.lanes import Crew

FIRST_SEED = 9_400_000
"""of no other measurement"""
LENGTH = 1024
"""tokens of a prompt, and of a passage's context"""
ANSWER = 24
"""tokens generated at most: an answer begins with what was asked for, as its first words are fed. Budgets are divided
for as many as the task generates"""
TEXT = "text"
"""begins what stands for the task where a passage is fed"""

Place = tuple[str, str, int]
"""task, or TEXT with its lengths; question; index of the prompt or passage"""
Rows = dict[tuple[Arm, Place], dict[str, Any]]
"""what came of an arm on a prompt (kvlens.lab.bench.tablestudy.row_of)"""


def places(statement: Statement, prompts: int) -> list[Place]:
    """On what a statement is tried: prompts of each task, or passages that share no text. Raises ValueError where the
    text has not so many."""
    if FIGURES[statement.figure].of_text:
        context, fed = statement.text
        return [(f"{TEXT} {context}+{fed}", "in", place) for place in apart(FIRST_SEED, prompts, sum(SHORT))]
    return [(task, statement.question, index) for index in range(prompts) for task in statement.tasks]


def list_arms(statements: Iterable[tuple[Statement, int]]) -> dict[Place, dict[Arm, None]]:
    """Return every arm of the statements on each of its places, each once. statements: each with its prompts."""
    arms_by_place: dict[Place, dict[Arm, None]] = {}
    for statement, prompts in statements:
        for place in places(statement, prompts):
            arms_by_place.setdefault(place, {}).update(dict.fromkeys(statement.arms))
    return arms_by_place


class ClaimsRequest(BaseModel):
    """The statements that are tried on a model (kvlens.lab.bench.tablestudy.StudyRequest)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str
    statements: tuple[tuple[Statement, int], ...]
    """each with its prompts of each task, or passages"""
    device: str = CPU
    minutes: float = Field(60.0, gt=0)
    dtype: str = "float32"
    traces: bool = False
    question: str = ""
    """each arm has its own"""

    @cached_property
    def arms_by_place(self) -> dict[Place, dict[Arm, None]]:
        """Arms by place, prompt by prompt."""
        arms_by_place = list_arms(self.statements)
        return {place: arms_by_place[place] for place in sorted(arms_by_place, key=lambda place: (place[2], place))}

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of the arms."""
        return tuple(sorted({arm.method for arms in self.arms_by_place.values() for arm in arms}))

    @cached_property
    def prompts(self) -> dict[Place, StudyPrompt]:
        """The prompt of each place. Arms that differ in the place of the question share it."""
        prompts: dict[tuple[str, int], StudyPrompt] = {}
        return {
            place: prompts.get((place[0], place[2]))
            or prompts.setdefault((place[0], place[2]), make_prompt(self.model, place[0], place[2]))
            for place in self.arms_by_place
        }

    def study_prompts(self) -> list[StudyPrompt]:
        """Return the prompts, each once."""
        return list({prompt.id: prompt for prompt in self.prompts.values()}.values())

    def arms(self) -> list[studies.Arm]:
        """Return all arms."""
        return self.plan().arms()

    def plan(self) -> studies.StudyPlan:
        """Return the study. All run on one thread: sums depend on their number."""
        ids: dict[str, tuple[studies.Arm, list[str]]] = {}
        for place, arms in self.arms_by_place.items():
            for arm in (study_arm(arm, place[1]) for arm in arms):
                ids.setdefault(arm.key(), (arm, []))[1].append(self.prompts[place].id)
        shared = {"model": self.model, "dtype": self.dtype, "device": self.device, "threads": 1, "max_new": ANSWER}
        return studies.StudyPlan(
            shared=RunRequest(**shared),
            entrants=(),
            listed=tuple(studies.ListedArm(arm=arm, prompts=tuple(names)) for arm, names in ids.values()),
            questions=tuple(dict.fromkeys(place[1] for place in self.arms_by_place)),
            traces=self.traces,
            generation="cut",
        )

    def rows(self, measured: Measured) -> Rows:
        """Return the rows of the trials that ended, by the statements' arms and places."""
        rows = {(row["prompt"], row["arm"]): row for row in measured.rows}
        keys = {
            (arm, place): (self.prompts[place].id, study_arm(arm, place[1]).key())
            for place, arms in self.arms_by_place.items()
            for arm in arms
        }
        return {trial: rows[key] for trial, key in keys.items() if key in rows}


def measure_arms(
    statements: Iterable[tuple[Statement, int]],
    model: str,
    device: str,
    minutes: float,
    runs_dir: Path,
    report: Callable[[str], None],
    crew: Crew | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Rows:
    """Carry out the study of the statements as far as `minutes` allow, and return its trials. statements: each with its
    prompts. Raises StudyBusy while another process carries it out."""
    request = ClaimsRequest(model=model, statements=tuple(statements), device=device, minutes=minutes)
    if not request.arms_by_place:
        return {}

    def watch(finished: int, total: int, row: dict[str, Any]) -> None:
        report(f"{finished}/{total} {row['prompt']}, {row['method']} {row['budget']}")

    return request.rows(carry_out_table("claims", request, runs_dir, watch, report, crew, cancelled))


def study_arm(arm: Arm, question: str) -> studies.Arm:
    """Return an arm of a statement as an arm of a study. Its changes are set after its preset was chosen, so that two
    arms of a statement differ in nothing else."""
    budget = "" if arm.method == REFERENCE else arm.budget or WHOLE
    return studies.Arm(method=arm.method, budget=budget, question=question, changes=dict(arm.changes))


def make_prompt(model: str, task: str, index: int) -> StudyPrompt:
    """Return the prompt of a place. Its id has a digest of its text: a task that draws another prompt, or a tokenizer
    that counts otherwise, makes another one."""
    seed = FIRST_SEED + index
    if task.startswith(TEXT):
        context, fed = map(int, task.removeprefix(TEXT).split("+"))
        text, forced = split_text(seed, context, fed, model)
        prompt = StudyPrompt("", PromptText(text), task, forced=forced)
    else:
        prompt = task_prompt(task, LENGTH, DEPTHS[index % len(DEPTHS)], seed, index, encoding(model), "")
    digest = hashlib.sha256(prompt.content.encode()).hexdigest()[:6]
    return replace(prompt, id=f"{task}/{index}/{digest}")
