"""Carries a study out, prompt by prompt: the model is loaded once, a prompt is read once for all its arms, full KV runs
first, and every trial is an ordinary stored run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvlens import methods
from kvlens.memory.budget import BudgetInfeasible
from kvlens.methods.faults import MethodFault, stray
from kvlens.models.device import settle
from kvlens.runs.freed import give_back
from kvlens.runs.modelsource import BY_NAME, ModelSource
from kvlens.runs.preparing import Pairing, Prepared, advice, check, plan, prepare, reference_key, sizes_of
from kvlens.runs.readings import keeping
from kvlens.runs.request import RunRequest
from kvlens.shortage import Shortage
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.studies import storage
from kvlens.studies.figures import figures_of
from kvlens.studies.plan import Arm, StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.text.prompts import tokenize

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference


class Audience(Protocol):
    """Who watches a study."""

    def report(self, phase: str, number: int, total: int) -> None:
        """How far the run of a trial is."""

    def trial(self, finished: int, total: int, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        """A trial has ended; `finished` of `total` have."""


class Study:
    """A stored study that is carried out."""

    def __init__(
        self, runs_dir: Path, info: StudyInfo, audience: Audience, cancelled: Callable[[], bool], models: ModelSource
    ) -> None:
        self._runs, self._info, self._audience, self._cancelled = runs_dir, info, audience, cancelled
        self._models = models
        self._plan: StudyPlan = info.plan
        self._arms = self._plan.arms()
        self._prompts = storage.read_prompts(runs_dir, info.id)
        trials = storage.read_trials(runs_dir, info.id)
        self._ended = {(trial.prompt, trial.arm) for trial in trials if trial.ended}
        self._done = len(self._ended)
        self._total = len(self._arms) * len(self._prompts)
        self._base: Prepared | None = None

    def run(self) -> bool:
        """Run what has not ended -> whether the study is whole. Raises ValueError or TraceError with one sentence where
        the model cannot be loaded or nothing can be stored."""
        for prompt in self._prompts:
            missing = [arm for arm in self._arms if (prompt.id, arm.key()) not in self._ended]
            for question in self._plan.questions:
                pending = [arm for arm in missing if arm.question == question]
                if pending and not self._cancelled():
                    self._run_prompt(prompt, question, pending)
                    give_back()
        return self._done == self._total

    def _run_prompt(self, prompt: StudyPrompt, question: str, arms: list[Arm]) -> None:
        """The arms of a prompt whose question is in one place: it is read once for all of them."""
        request = self._request(prompt, Arm(method=methods.REFERENCE, question=question))
        try:
            prepared = self._prepared(prompt, request, arms)
        except ValueError as error:
            if self._base is None:
                raise  # the model, not the prompt
            for arm in arms:
                self._tell(prompt, arm, Trial(prompt.id, arm.key(), "refused", message=str(error)))
            return
        for seed in dict.fromkeys(arm.seed for arm in arms):
            self._run_seed(prompt, prepared, [arm for arm in arms if arm.seed == seed])

    def _run_seed(self, prompt: StudyPrompt, prepared: Prepared, arms: list[Arm]) -> None:
        """The arms of one seed, all compared with the same run of full KV."""
        from kvlens.runs.reference import obtain

        full = Arm(method=methods.REFERENCE, question=arms[0].question, seed=arms[0].seed)
        request = self._request(prompt, full)
        try:
            plan(request, prepared)
            reference = obtain(prepared, request, self._runs, self._audience.report, self._cancelled)
        except (ValueError, Shortage) as error:
            if self._cancelled():
                return
            state = "failed" if isinstance(error, Shortage) else "refused"
            for arm in arms:
                self._tell(prompt, arm, Trial(prompt.id, arm.key(), state, message=str(error)))
            return
        for arm in arms:
            if self._cancelled():
                return
            if arm == full:
                trial: Trial | None = self._completed(prompt, arm, reference.uid)
            else:
                trial = self._run_arm(prompt, prepared, arm, reference)
            if trial is not None:
                self._tell(prompt, arm, trial)

    def _run_arm(self, prompt: StudyPrompt, prepared: Prepared, arm: Arm, reference: Reference) -> Trial | None:
        """One trial; None where it was cancelled. Whatever goes wrong in it is its own."""
        from kvlens.runs.storing import store

        request = self._request(prompt, arm)
        try:
            check(request)
            planned = plan(request, prepared)
            pairing = Pairing(reference, reference.uid, reference_key(request, prepared))
            stored = store(prepared, request, planned, pairing, self._runs, self._audience.report, self._cancelled)
        except BaseException as error:
            fault = stray(arm.method, error)
            if not isinstance(fault, Exception):
                raise
            return None if self._cancelled() else self._stopped(prompt, prepared, arm, request, fault)
        return self._completed(prompt, arm, stored.uid) if stored.status == "completed" else None

    def _stopped(
        self, prompt: StudyPrompt, prepared: Prepared, arm: Arm, request: RunRequest, error: Exception
    ) -> Trial:
        """A trial that did not come to its end."""
        if isinstance(error, BudgetInfeasible):
            error = advice(request, sizes_of(request, prepared), error.smallest)
        if isinstance(error, Shortage | TraceError | MethodFault):
            return Trial(prompt.id, arm.key(), "failed", message=str(error))
        if isinstance(error, ValueError):
            return Trial(prompt.id, arm.key(), "refused", message=str(error))
        traceback.print_exception(error)
        return Trial(prompt.id, arm.key(), "failed", message=f"{type(error).__name__}: {error}")

    def _completed(self, prompt: StudyPrompt, arm: Arm, uid: str) -> Trial:
        with TraceReader.open(self._runs, uid) as reader:
            return Trial(prompt.id, arm.key(), "completed", uid, figures=figures_of(reader))

    def _tell(self, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        storage.append(self._runs, self._info.id, trial)
        if trial.ended:
            self._done += 1
        self._audience.trial(self._done, self._total, prompt, arm, trial)

    def _request(self, prompt: StudyPrompt, arm: Arm) -> RunRequest:
        changes: dict[str, object] = {"device": settle(self._plan.shared.device)}
        if prompt.system is not None:
            changes["system"] = prompt.system
        if prompt.turns:
            changes["turns"] = prompt.turns
        return self._plan.request(arm).model_copy(update=changes)

    def _prepared(self, prompt: StudyPrompt, request: RunRequest, arms: list[Arm]) -> Prepared:
        """The loaded model with the prompt, whose reading serves all methods that are to come. Raises ValueError."""
        reading = keeping([methods.get(arm.method) for arm in arms])
        if self._base is None:
            self._base = prepare(request, prompt.source, self._audience.report, models=self._models)
            self._same_model(self._base.fingerprint)
            return replace(self._base, kept=reading)
        tokenizer = self._base.engine.loaded.tokenizer
        form = (request.chat, request.system, request.question)
        tokens = tokenize(prompt.source, tokenizer, None, request.max_new, *form, None, request.turns)
        return replace(self._base, prompt=tokens, kept=reading)

    def _same_model(self, fingerprint: str) -> None:
        """Raises ValueError where the weights are not those that the study began with."""
        if self._info.fingerprint is None:
            self._info.fingerprint = fingerprint
            storage.save(self._runs, self._info)
        elif self._info.fingerprint != fingerprint:
            model = self._plan.shared.model
            raise ValueError(f"{model} has changed since study {self._info.id} began: begin a new study.")


def carry_out(
    runs_dir: Path, study_id: str, audience: Audience, cancelled: Callable[[], bool], models: ModelSource = BY_NAME
) -> bool:
    """Run what a stored study lacks -> whether it is whole now. Cancelled, every trial that has ended is kept.

    Raises StudyBusy while another process carries it out; ValueError or TraceError with one sentence.
    """
    with storage.carried_out_alone(runs_dir, study_id):
        return Study(runs_dir, storage.read(runs_dir, study_id), audience, cancelled, models).run()
