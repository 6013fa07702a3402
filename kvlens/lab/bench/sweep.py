"""Sweeps: method x budget x task x length x depth x seed, as a study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import Field, field_validator

from kvlens import tasks
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.tablerequest import Place, TableRequest
from kvlens.lab.bench.tablestudy import Say, Watch, carry_out_table, silent
from kvlens.lab.bench.trialprompts import DEPTHS
from kvlens.lab.results.names import TaskNames
from kvlens.workers.lanes import Crew


class SweepRequest(TableRequest):
    """What to measure."""

    tasks: TaskNames = Field(default_factory=lambda fields: tasks.usual(fields["model"])[:1])
    budgets: tuple[str, ...] = ("10%", "20%")
    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = DEPTHS
    prompts: int = Field(5, ge=1)
    """per task, length and depth; of a file, at most so many of its prompts"""
    cut: int | None = Field(None, ge=64)
    """tokens a file's prompts are cut to, in their middle; None: they stay whole"""
    first_seed: int = 9_000_000
    traces: bool = True

    @field_validator("depths")
    @classmethod
    def _in_the_text(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        for depth in value:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must lie between 0 (start) and 1 (end), not {depth}.")
        return value

    def prompts_of(self, task: str) -> Iterator[Place]:
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

    def places(self) -> Iterator[Place]:
        """Yield the prompts of all tasks in turn: the first of every cell, then the second of every cell."""
        rounds: dict[int, list[Place]] = {}
        for task in self.tasks:
            for prompt in self.prompts_of(task):
                rounds.setdefault(prompt[-1], []).append(prompt)
        for index in sorted(rounds):
            yield from rounds[index]


def sweep(
    request: SweepRequest,
    runs_dir: Path,
    watch: Watch,
    say: Say = silent,
    crew: Crew | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """Run what the sweep's study lacks, and return its provenance and the rows of all trials asked for that have
    ended. Arguments and errors: see kvlens.lab.bench.tablestudy.carry_out_table."""
    measured = carry_out_table("sweep", request, runs_dir, watch, say, crew, cancelled)
    product = about(request.methods, request.model) | {
        "request": request.model_dump(mode="json"),
        "origins": measured.origins,
        "trials": len(measured.rows),
        "planned": measured.planned,
    }
    return product, measured.rows
