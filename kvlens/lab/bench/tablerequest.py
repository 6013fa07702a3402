"""What comparisons of methods ask alike, checked before a model is loaded: methods under budgets, and, for a quality
table and a sweep, tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvlens import methods
from kvlens.budget import Budget
from kvlens.lab.results.names import MethodNames, TaskNames
from kvlens.models.find import default_model
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.studies.plan import Arm, StudyPlan
from kvlens.studies.promptrow import StudyPrompt, task_prompt
from kvlens.tasks.encoding import encoding

Place = tuple[str, int | None, float | None, int, int]
"""task, length, depth, seed, index: what makes a prompt (kvlens.tasks.remake)"""


class ComparedRequest(BaseModel):
    """Methods under budgets. Bad values are refused here, before a model is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(default_factory=default_model)
    methods: MethodNames = Field(default_factory=lambda: tuple(methods.registry()))
    """the reference is run without a limit"""
    budgets: tuple[str, ...]
    first_seed: int
    minutes: float = Field(60.0, gt=0)
    """stop after this long; what is done is kept and counts"""

    @field_validator("budgets")
    @classmethod
    def _shares(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for budget in value:
            if Budget.parse(budget).unit != "share":
                raise ValueError(f"methods are compared at shares of full KV (0.1 or 10%), not at '{budget}'.")
        return value


class TableRequest(ComparedRequest):
    """What to measure on tasks; the reference is run once per prompt."""

    tasks: TaskNames
    prompts: int = Field(ge=1)
    question: Literal["in", "after"] = "in"
    """whether the question is read and placed with its context, or fed once the context was placed"""
    dtype: str = "float32"
    """what the table is computed in; the noise floor is in another format"""

    traces: bool = False
    """store every trial as a run"""
    device: str = "cpu"

    def places(self) -> Iterator[Place]:
        """Yield the prompts, whole rounds first."""
        raise NotImplementedError

    def study_prompts(self) -> list[StudyPrompt]:
        """Return the prompts of the study, in the order of the places."""
        counted = encoding(self.model)
        return [
            task_prompt(*place, counted, name) for place, name in zip(self.places(), self.prompt_ids(), strict=True)
        ]

    def prompt_ids(self) -> list[str]:
        """Return the names of the prompts, in the order of the places."""
        return ["/".join(str(part) for part in place if part is not None) for place in self.places()]

    def plan(self) -> StudyPlan:
        """Return the study whose trials are the table. Full KV is in every study; it is run a second time in another
        number format where it is asked for: what rounding alone changes. All run on one
        thread: sums depend on their number."""
        counterpart = "float32" if self.dtype == "bfloat16" else "bfloat16"
        return StudyPlan(
            shared=RunRequest(model=self.model, dtype=self.dtype, device=self.device, threads=1),
            entrants=tuple(Entrant(method=name) for name in self.methods),
            budgets=self.budgets,
            questions=(self.question,),
            reference_dtypes=(counterpart,) if methods.REFERENCE in self.methods else (),
            traces=self.traces,
            generation="task",
        )

    def arms(self) -> list[Arm]:
        """Return what every prompt is run under, in the order of the methods; full KV where it is asked for."""
        arms = self.plan().arms()
        return [arm for name in self.methods for arm in arms if arm.method == name]
