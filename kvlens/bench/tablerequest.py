"""What a quality table and a sweep ask alike: methods under budgets on tasks, checked before a model is loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvlens import methods, tasks
from kvlens.memory.budget import Budget


class TableRequest(BaseModel):
    """What to measure. Bad values are refused here, before a model is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = "demo"
    methods: tuple[str, ...] = Field(default_factory=lambda: tuple(methods.registry()))
    """the reference is run once per prompt, without a limit"""
    tasks: tuple[str, ...]
    budgets: tuple[str, ...]
    prompts: int = Field(ge=1)
    first_seed: int
    question: Literal["in", "after"] = "in"
    """whether the question is read and placed with its context, or fed once the context was placed"""
    minutes: float = Field(60.0, gt=0)
    """stop after this long; what is done is kept and counts"""

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for task in value:
            tasks.get(task)
        return value

    @field_validator("methods")
    @classmethod
    def _known_methods(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            methods.get(name)
        return value

    @field_validator("budgets")
    @classmethod
    def _shares(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for budget in value:
            if Budget.parse(budget).unit != "share":
                raise ValueError(f"methods are compared at shares of full KV (0.1 or 10%), not at '{budget}'.")
        return value

    def arms(self) -> list[tuple[str, str]]:
        """(method, budget) that every prompt is run under; no budget for the reference."""
        return [
            (name, budget) for name in self.methods for budget in (("",) if name == methods.REFERENCE else self.budgets)
        ]
