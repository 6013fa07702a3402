"""What a batch saves: decode steps of several prompts together against one prompt after the other, and a study's trials
a minute both ways, in turns in one process.

The steps of a round are those of the same prompts, read before. A study's prompts are read anew in each arm; it records
query heads (trace level `heads`), so no effect of a loss is computed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.stepcosts import BUDGET, TASK, Arm, Costs
from kvlens.engine.batch import Seat, StepBatch
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.runs.turns import Hearing, Turns
from kvlens.studies import storage
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.running import carry_out
from kvlens.tasks.encoding import encoding
from kvlens.workers.lanes import Crew

Seconds = tuple[float, float]
"""CPU seconds of all threads, wall seconds"""


class Silent:
    """Hears of a study (kvlens.studies.running.Audience)."""

    def report(self, phase: str, number: int, total: int) -> None:
        """Nobody follows the phases."""

    def trial(self, finished: int, total: int, *rest: Any) -> None:
        """Nobody follows the trials."""


def timed(work: Callable[[], object]) -> Seconds:
    """Return what a call takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


class Both:
    """A prompt's runs under one arm, `size` of them, one after the other and together."""

    def __init__(self, costs: Costs, arm: Arm, tokens: int, size: int) -> None:
        self.costs, self.arm, self.size = costs, arm, size
        self.prompt, self.read = costs.read(tokens)
        self._engine, self._threads = costs.engine, torch.get_num_threads()

    def seconds(self, steps: int) -> tuple[Seconds, Seconds]:
        """Return what runs of so many steps take alone and together, placing and recording included."""
        self.costs.steps = steps
        return timed(self._run_alone), timed(self._run_together)

    def _run_alone(self) -> None:
        for _ in range(self.size):
            self.costs.run(self.arm, self.prompt, self.read)

    def _run_together(self) -> None:
        turns, hearing, batch = Turns(self.size), Hearing(), StepBatch()

        def run_lane(lane: int) -> None:
            turns.wait(lane)
            torch.set_num_threads(self._threads)
            self.costs.engine = self._engine.seated(Seat(batch, partial(turns.hand_on, lane)))
            try:
                self.costs.run(self.arm, self.prompt, self.read)
            finally:
                turns.leave(lane)

        hearing.run([partial(run_lane, lane) for lane in range(self.size)])
        self.costs.engine = self._engine
        assert batch.passes == {self.size: self.costs.steps}


def measure_steps(
    model: str, tokens: int, arms: Sequence[Arm], size: int, rounds: int, steps: int
) -> Iterator[dict[str, Any]]:
    """Yield a row per arm: seconds of a prompt's step, recording included, alone and in a batch; medians over rounds.
    A run of one step is taken off, so that placing does not count."""
    costs = Costs(model, steps)
    names = ("alone_cpu_s", "alone_wall_s", "batch_cpu_s", "batch_wall_s")
    for arm in arms:
        both, rows = Both(costs, arm, tokens, size), []
        both.seconds(1)  # the first passes allocate
        for _ in range(rounds):
            few, many = sum(both.seconds(1), ()), sum(both.seconds(steps), ())
            rows.append([(b - a) / size / (steps - 1) for a, b in zip(few, many, strict=True)])
        figures = {name: round(median(values), 5) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
        ratios = {
            f"{clock}_ratio": round(median(row[place] / row[place + 2] for row in rows), 3)
            for place, clock in enumerate(("cpu", "wall"))
        }
        yield {"model": model, "tokens": tokens, "arm": f"{arm.name}, batch {size}", "n": rounds} | figures | ratios


def measure_study(model: str, tokens: int, methods: str, size: int, steps: int) -> dict[str, Any]:
    """Return the trials a minute of a study of `size` prompts under full KV and methods ("snapkv,h2o"), alone and in a
    batch."""
    prompts = read_prompts([f"{TASK}@length={tokens}@prompts={size}"], lambda: encoding(model)).prompts
    shared = RunRequest(model=model, max_new=steps, ignore_eos=True, trace_level="heads")
    plan = StudyPlan(
        shared=shared, entrants=tuple(Entrant(method=method) for method in methods.split(",")), budgets=(BUDGET,)
    )
    figures: dict[str, float] = {}
    for name, batch in (("alone", 1), ("batch", size)):
        with tempfile.TemporaryDirectory() as folder:
            info = storage.create(Path(folder), plan, prompts)
            cpu, wall = timed(
                partial(carry_out, Path(folder), info.id, Silent(), lambda: False, crew=Crew(batch=batch))
            )
            count = len(storage.read_trials(Path(folder), info.id))
        figures |= {f"{name}_cpu_s": round(cpu / count, 3), f"{name}_wall_s": round(wall / count, 3)}
        figures[f"{name}_trials_per_minute"] = round(60 * count / wall, 2)
    ratio = round(figures["alone_wall_s"] / figures["batch_wall_s"], 3)
    cpu_ratio = round(figures["alone_cpu_s"] / figures["batch_cpu_s"], 3)
    row = {"model": model, "tokens": tokens, "arm": f"{methods}, study, batch {size}", "n": 1}
    return row | figures | {"cpu_ratio": cpu_ratio, "wall_ratio": ratio}
