"""What comparisons of methods ask alike, checked before a model is loaded: methods under budgets, and, for a quality
table and a sweep, tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvlens import methods
from kvlens.lab.results.names import MethodNames, TaskNames
from kvlens.memory.budget import Budget
from kvlens.models.find import default_model


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

    def arms(self) -> list[tuple[str, str, str, str]]:
        """(method, budget, question, number format) that every prompt is run under, '' = the table's own format. The
        reference has no budget, and stands a second time in another number format: what rounding alone changes."""
        pairs: list[tuple[str, str, str, str]] = []
        for name in self.methods:
            if name == methods.REFERENCE:
                counterpart = "float32" if self.dtype == "bfloat16" else "bfloat16"
                pairs += [(name, "", self.question, dtype) for dtype in ("", counterpart)]
            else:
                pairs += [(name, budget, self.question, "") for budget in self.budgets]
        return pairs
