"""What a sweep is asked to measure, and the trials that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

from pydantic import Field, field_validator

from kvlens import tasks
from kvlens.lab.bench.tablerequest import TableRequest
from kvlens.lab.bench.trialprompts import DEPTHS, Trial
from kvlens.lab.results.names import TaskNames


class SweepRequest(TableRequest):
    """What to measure."""

    tasks: TaskNames = Field(default_factory=lambda given: tasks.usual(given["model"])[:1])
    budgets: tuple[str, ...] = ("10%", "20%")
    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = DEPTHS
    prompts: int = Field(5, ge=1)
    """per task, length and depth; of a file, at most so many of its prompts"""
    cut: int | None = Field(None, ge=64)
    """tokens a file's prompts are cut to, in their middle; None: they stay whole"""
    first_seed: int = 9_000_000
    traces: bool = True
    """store every trial as a run"""
    device: str = "cpu"
    workers: int = Field(1, ge=1, le=256)
    ray: str | None = None
    """address of a Ray cluster; None: processes of this machine"""

    @field_validator("depths")
    @classmethod
    def _in_the_text(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        for depth in value:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must lie between 0 (start) and 1 (end), not {depth}.")
        return value

    def prompts_of(self, task: str) -> Iterator[tuple[str, int | None, float | None, int, int]]:
        """(task, length, depth, seed, index): one prompt of every cell before the second of any."""
        results = tasks.get(task)
        for index in range(min(self.prompts, results.items or self.prompts)):
            if results.items is not None:
                yield task, self.cut, None, 0, index
                continue
            for length in self.lengths:
                for depth in self.depths if results.placed else (None,):
                    yield task, length, depth, self.seed(length, depth, index), index

    def seed(self, length: int, depth: float | None, index: int) -> int:
        """Every cell has seeds of its own, so that cells are independent; other lengths and depths do not change
        them."""
        return self.first_seed + 1000 * (crc32(f"{length}/{depth}".encode()) % 1_000_000) + index

    def groups(self) -> list[list[Trial]]:
        """Trials by prompt, in order: the prompts of all tasks in turn, under every method and budget."""
        rounds: dict[int, list[tuple[str, int | None, float | None, int, int]]] = {}
        for task in self.tasks:
            for prompt in self.prompts_of(task):
                rounds.setdefault(prompt[-1], []).append(prompt)
        return [[Trial(*prompt, *arm) for arm in self.arms()] for index in sorted(rounds) for prompt in rounds[index]]
