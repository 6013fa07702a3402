"""Carries a study out, prompt by prompt, with one worker or several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvlens.models.device import settle
from kvlens.runs.request import BY_NAME, ModelSource, Report
from kvlens.studies import storage
from kvlens.studies.batchmemory import check_batch
from kvlens.studies.errors import BadStudy
from kvlens.studies.models import StudyModels
from kvlens.studies.plan import Arm
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.studies.trialrunner import TrialRunner
from kvlens.workers.handing import hand_out
from kvlens.workers.lanes import Crew, Job, open_lanes

if TYPE_CHECKING:
    from kvlens.engine.batch import Seat


class Audience(Protocol):
    """Who watches a study."""

    def report(self, phase: str, number: int, total: int) -> None:
        """How far the run of a trial is."""

    def trial(self, finished: int, total: int, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        """A trial has ended; `finished` of `total` have."""


@dataclass(frozen=True)
class Place:
    """Where a worker finds its study, picklable."""

    runs_dir: str
    study: str


@dataclass(frozen=True)
class Item:
    """A prompt under an arm, by their names."""

    prompt: str
    arm: str


@dataclass(frozen=True)
class Done:
    """What a worker returns of an item."""

    trial: Trial
    fingerprint: str | None
    """of the worker's model"""


@dataclass(frozen=True)
class Part:
    """What of a study is run."""

    trials: Collection[tuple[str, str]] | None = None
    """(prompt, key of the arm); None: all"""
    origins: Mapping[str, str] | None = None
    """method -> what makes its trials comparable: a trial of another origin is run again; None: trials stay"""

    def has(self, prompt: str, arm: str) -> bool:
        """Return whether a trial is part of it."""
        return self.trials is None or (prompt, arm) in self.trials


WHOLE = Part()


class StudyWorker:
    """Loads the model once and runs trials of one study, one at a time. It stores runs, and writes no file of the
    study."""

    def __init__(self, place: Place) -> None:
        folder = Path(place.runs_dir)
        info = storage.read(folder, place.study)
        self._prompts = {prompt.id: prompt for prompt in storage.read_prompts(folder, place.study)}
        self._arms = {arm.key(): arm for arm in info.plan.arms()}
        self._runner = TrialRunner(folder, info, lambda phase, number, total: None, lambda: False)

    def run(self, item: Item) -> Done:
        """Return the trial of a prompt and an arm."""
        trial = self._runner.trial(self._prompts[item.prompt], self._arms[item.arm])
        assert trial is not None, "nobody cancels a worker's trial"
        return Done(trial, self._runner.fingerprint)


class Study:
    """A stored study that is carried out."""

    def __init__(
        self,
        runs_dir: Path,
        info: StudyInfo,
        audience: Audience,
        cancelled: Callable[[], bool],
        models: ModelSource,
        part: Part,
    ) -> None:
        self._runs, self._info, self._audience, self._cancelled = runs_dir, info, audience, cancelled
        self._models, self._part = models, part
        self._arms = {arm.key(): arm for arm in info.plan.arms()}
        self._prompts = {prompt.id: prompt for prompt in storage.read_prompts(runs_dir, info.id)}
        planned = [pair for pair in info.plan.trials(self._prompts) if part.has(*pair)]
        trials = storage.read_trials(runs_dir, info.id)
        self._ended = {(trial.prompt, trial.arm) for trial in trials if self._serves(trial)}
        self._done = len(self._ended & set(planned))
        self._total = len(planned)
        self._waiting: dict[str, list[Arm]] = {prompt: [] for prompt in self._prompts}
        for prompt, key in planned:
            if (prompt, key) not in self._ended:
                self._waiting[prompt].append(self._arms[key])

    def run(self, crew: Crew) -> bool:
        """Run what has not ended -> whether the study is whole. Raises ValueError or TraceError with one sentence where
        the model cannot be loaded or nothing can be stored."""
        self._keep_batch(crew)
        groups = [group for prompt in self._prompts for group in (self._pending(prompt),) if group]
        if crew.batch > 1:
            self._run_together(groups, crew)
        elif crew.here:
            self._run_here(groups)
        elif groups:
            self._run_apart(groups, crew)
        return self._done == self._total

    def _keep_batch(self, crew: Crew) -> None:
        """Store the crew's batch with the study."""
        if self._info.batch != crew.batch:
            self._info.batch = crew.batch
            storage.save(self._runs, self._info)

    def _serves(self, trial: Trial) -> bool:
        """The trial has ended. Where origins count, it is of that origin, and its run is there where it has one."""
        origins = self._part.origins
        if not trial.ended or trial.arm not in self._arms:
            return False
        if origins is None:
            return True
        if trial.origin != origins.get(self._arms[trial.arm].method):
            return False
        return trial.uid is None or (self._runs / trial.uid / "trace.duckdb").is_file()

    def _pending(self, prompt: str) -> list[Item]:
        """What has not ended of a prompt, in the order in which a reading and a reference serve the most."""
        questions, seeds = (
            list(dict.fromkeys(getattr(arm, name) for arm in self._arms.values())) for name in ("question", "seed")
        )
        arms = sorted(
            self._waiting[prompt], key=lambda arm: (questions.index(arm.question), arm.dtype, seeds.index(arm.seed))
        )
        return [Item(prompt, arm.key()) for arm in arms]

    def _run_here(self, groups: list[list[Item]]) -> None:
        runner = TrialRunner(self._runs, self._info, self._audience.report, self._cancelled, self._models)
        for group in groups:
            for item in group:
                result = None if self._cancelled() else self._done_by(runner, item)
                if result is None:
                    return
                self._finish(result)
        runner.end_prompt()

    def _done_by(self, runner: TrialRunner, item: Item) -> Done | None:
        """Return an item's trial; None where it was cancelled."""
        trial = runner.trial(self._prompts[item.prompt], self._arms[item.arm])
        return None if trial is None else Done(trial, runner.fingerprint)

    def _run_together(self, groups: list[list[Item]], crew: Crew) -> None:
        from kvlens.studies.batching import carry_out_together  # loads torch

        if self._models.named:
            check_batch(self._info.plan, [self._prompts[group[0].prompt] for group in groups], crew.batch)
        models = StudyModels(self._runs, self._info, self._models)

        def runner_at(seat: Seat | None, report: Report, stop: Callable[[], bool]) -> TrialRunner:
            return TrialRunner(self._runs, self._info, report, stop, models, seat)

        report = self._audience.report
        carry_out_together(crew.batch, groups, runner_at, self._done_by, self._finish, report, self._cancelled)

    def _run_apart(self, groups: list[list[Item]], crew: Crew) -> None:
        if not self._models.named:
            raise BadStudy(
                "model_is_object", "workers load the model by its name: name it, or leave out workers and ray."
            )
        place = Place(str(self._runs.resolve()), self._info.id)
        on_gpu = settle(self._info.plan.shared.device).startswith("cuda")
        job = Job(StudyWorker, place, item_words, on_gpu)
        sentence = f"what has ended is kept: kvlens studies resume {self._info.id}"
        hand_out(open_lanes(crew, job), groups, self._finish, self._cancelled, kept_words=sentence)

    def _finish(self, result: Done) -> None:
        self._keep_model(result.fingerprint)
        trial, origins = result.trial, self._part.origins
        if origins is not None:
            trial = replace(trial, origin=origins[self._arms[trial.arm].method])
        storage.append(self._runs, self._info.id, trial)
        if trial.ended:
            self._done += 1
        prompt, arm = self._prompts[trial.prompt], self._arms[trial.arm]
        self._audience.trial(self._done, self._total, prompt, arm, trial)

    def _keep_model(self, fingerprint: str | None) -> None:
        """Raises BadStudy where a worker's weights are not those that the study began with."""
        if self._info.fingerprint is None and fingerprint is not None:
            self._info.fingerprint = fingerprint
            storage.save(self._runs, self._info)
        elif fingerprint not in (None, self._info.fingerprint):
            model = self._info.plan.shared.model
            raise BadStudy("model_changed", f"{model} is not the same for all workers of study {self._info.id}.")


def item_words(item: Item) -> str:
    """Return an item in words."""
    return f"{item.prompt} under arm {item.arm}"


def carry_out(
    runs_dir: Path,
    study_id: str,
    audience: Audience,
    cancelled: Callable[[], bool],
    models: ModelSource = BY_NAME,
    crew: Crew | None = None,
    part: Part = WHOLE,
) -> bool:
    """Run what a stored study lacks -> whether it is whole now. Cancelled, every trial that has ended is kept.

    Args:
        crew: workers that share the prompts; None: one, in this process, with the study's batch, which a crew sets.
            Workers apart finish the trial that they are in when the study is cancelled.
        part: what of the study is run.

    Raises StudyBusy while another process carries it out; ValueError or TraceError with one sentence.
    """
    with storage.carried_out_alone(runs_dir, study_id):
        info = storage.read(runs_dir, study_id)
        return Study(runs_dir, info, audience, cancelled, models, part).run(crew or Crew(batch=info.batch))
