"""Sweeps: method x budget x task x length x depth x seed. Resumable: a finished trial is on the disk before the next
one begins, and is known again by what was asked (method with its parameters, budget, model) and by its prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import Field, field_validator

from kvlens import tasks
from kvlens.bench import kept as lines_kept
from kvlens.bench.sweep.lanes import Lane, lanes, run_lanes
from kvlens.bench.sweep.work import Place
from kvlens.bench.tablerequest import TableRequest
from kvlens.bench.trials import DEPTHS, Trial

Report = Callable[[int, int, dict[str, Any]], None]


class SweepRequest(TableRequest):
    """What to measure."""

    tasks: tuple[str, ...] = ("needle",)
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
    dtype: str = "float32"
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
        found = tasks.get(task)
        for index in range(min(self.prompts, found.items or self.prompts)):
            if found.items is not None:
                yield task, self.cut, None, 0, index
                continue
            for length in self.lengths:
                for depth in self.depths if found.placed else (None,):
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


@lines_kept.alone
def sweep(
    request: SweepRequest,
    kept: Path,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
    open_lanes: Callable[[SweepRequest, Place], list[Lane]] = lanes,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run what is not in `kept` (one JSON line per trial) yet -> provenance and the rows of all trials asked for that
    are done.

    report(done, total, row) after each new trial. Ends early when `cancelled` says so or the minutes are over; nothing
    done is lost. Raises ValueError for a file that does not hold trials, and when a worker died (after the others have
    ended).
    """
    from kvlens.bench.provenance import about, origin

    origins = {name: origin(request.model, name, request.device, request.dtype) for name in request.methods}
    rows = {row["key"]: row for row in lines_kept.read(kept, ("key", "method", "origin"), lambda row: True)}
    place = Place(request.model, request.device, request.dtype, origins, str(runs_dir) if request.traces else None)
    groups = request.groups()
    total, done = sum(map(len, groups)), 0
    until = time.monotonic() + 60 * request.minutes

    def known(key: str) -> bool:
        nonlocal done
        row = rows.get(key)
        stored = row is not None and (not request.traces or "exact" not in row or _stored(runs_dir, row.get("uid")))
        done += stored
        return stored

    def finished(row: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        row |= {"origin": origins[row["method"]]}
        rows[row["key"]] = row
        lines_kept.append(kept, row)
        report(done, total, row)

    run_lanes(open_lanes(request, place), groups, known, finished, lambda: cancelled() or time.monotonic() > until)
    by_trial = {_asked(row): row for row in rows.values() if row["origin"] == origins.get(row["method"])}
    found = [by_trial[astuple(trial)] for group in groups for trial in group if astuple(trial) in by_trial]
    made = about(request.methods, request.model) | {
        "request": request.model_dump(mode="json"),
        "origins": origins,
        "trials": len(found),
        "planned": total,
    }
    return made, found


def _asked(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(field.name) for field in fields(Trial))


def _stored(runs_dir: Path, uid: str | None) -> bool:
    return uid is not None and (runs_dir / uid / "trace.duckdb").is_file()
