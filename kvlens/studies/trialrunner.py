"""Runs single trials of a study: the model is loaded once, a prompt is read once for all its arms, full KV runs first,
and every trial is an ordinary stored run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import methods
from kvlens.memory.budget import BudgetInfeasible
from kvlens.methods.faults import MethodFault, stray
from kvlens.models.device import settle
from kvlens.runs.carrying import give_back
from kvlens.runs.preparing import Pairing, Prepared, advice, check, plan, prepare, reference_key, sizes_of
from kvlens.runs.readings import keeping
from kvlens.runs.request import BY_NAME, ModelSource, Report, RunRequest
from kvlens.shortage import Shortage
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.studies.errors import BadStudy
from kvlens.studies.figures import figures_of
from kvlens.studies.plan import Arm, StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.text.prompts import tokenize

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference


class TrialRunner:
    """Runs the trials of a study one by one.

    Trials of one prompt and place of the question that follow each other share the prompt's reading. Questions that are
    fed after one context share it too. Trials of one seed share full KV's run."""

    def __init__(
        self,
        runs_dir: Path,
        info: StudyInfo,
        report: Report,
        cancelled: Callable[[], bool],
        models: ModelSource = BY_NAME,
    ) -> None:
        self._runs, self._info, self._report, self._cancelled = runs_dir, info, report, cancelled
        self._models = models
        self._plan: StudyPlan = info.plan
        self._arms = self._plan.arms()
        self._base: Prepared | None = None
        self._place: tuple[str, str] | None = None
        """(prompt, place of the question) of what is prepared"""
        self._prepared: Prepared | str = ""
        """the model with the prompt; a sentence where it cannot be fed"""
        self._references: dict[int, Reference | Trial] = {}
        """seed -> full KV's run, or the trial of an arm that cannot be compared with one"""

    @property
    def fingerprint(self) -> str | None:
        """Of the model; None before the first trial."""
        return None if self._base is None else self._base.fingerprint

    def trial(self, prompt: StudyPrompt, arm: Arm) -> Trial | None:
        """Run a trial; None where it was cancelled. Whatever goes wrong in a method's hook is its own trial's.

        Raises ValueError where the model cannot be loaded, BadStudy `model_changed` where its weights are not those
        that the study began with.
        """
        prepared = self._prompt(prompt, arm.question)
        if isinstance(prepared, str):
            return Trial(prompt.id, arm.key(), "refused", message=prepared)
        reference = self._reference(prompt, arm, prepared)
        if reference is None:
            return None
        if isinstance(reference, Trial):
            return replace(reference, arm=arm.key())
        if arm.method == methods.REFERENCE:
            return self._completed(prompt, arm, reference.uid)
        return self._run_arm(prompt, prepared, arm, reference)

    def end_prompt(self) -> None:
        """Give back the memory of the prompt that was run last."""
        self._place, self._prepared = None, ""
        self._references.clear()
        give_back()

    def _prompt(self, prompt: StudyPrompt, question: str) -> Prepared | str:
        if self._place != (prompt.id, question):
            previous = self._prepared
            if self._place is not None:
                self.end_prompt()
            request = self._request(prompt, Arm(method=methods.REFERENCE, question=question))
            arms = [arm for arm in self._arms if arm.question == question]
            try:
                self._prepared = self._prepare(prompt, request, arms, previous)
            except ValueError as error:
                if self._base is None or isinstance(error, BadStudy):
                    raise  # the model, not the prompt
                self._prepared = str(error)
            self._place = prompt.id, question
        return self._prepared

    def _reference(self, prompt: StudyPrompt, arm: Arm, prepared: Prepared) -> Reference | Trial | None:
        """Full KV's run that an arm is compared with; a trial that says why there is none; None: cancelled."""
        from kvlens.runs.reference import obtain

        if arm.seed in self._references:
            return self._references[arm.seed]
        full = Arm(method=methods.REFERENCE, question=arm.question, seed=arm.seed)
        request = self._request(prompt, full)
        try:
            plan(request, prepared)
            self._references[arm.seed] = obtain(prepared, request, self._runs, self._report, self._cancelled)
        except (ValueError, Shortage) as error:
            if self._cancelled():
                return None
            state = "failed" if isinstance(error, Shortage) else "refused"
            self._references[arm.seed] = Trial(prompt.id, full.key(), state, message=str(error))
        return self._references[arm.seed]

    def _run_arm(self, prompt: StudyPrompt, prepared: Prepared, arm: Arm, reference: Reference) -> Trial | None:
        """The trial of an arm that is no reference; None where it was cancelled."""
        from kvlens.runs.storing import store

        request = self._request(prompt, arm)
        try:
            check(request)
            planned = plan(request, prepared)
            pairing = Pairing(reference, reference.uid, reference_key(request, prepared))
            stored = store(prepared, request, planned, pairing, self._runs, self._report, self._cancelled)
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

    def _request(self, prompt: StudyPrompt, arm: Arm) -> RunRequest:
        changes: dict[str, object] = {"device": settle(self._plan.shared.device)}
        if prompt.system is not None:
            changes["system"] = prompt.system
        if prompt.turns:
            changes["turns"] = prompt.turns
        return self._plan.request(arm).model_copy(update=changes)

    def _prepare(self, prompt: StudyPrompt, request: RunRequest, arms: list[Arm], previous: Prepared | str) -> Prepared:
        """The loaded model with the prompt, whose reading serves all methods that are to come. A context that the
        prompt before had too, of a question that is fed after it, is not read again. Raises ValueError."""
        reading = keeping([methods.get(arm.method) for arm in arms])
        if self._base is None:
            self._base = prepare(request, prompt.source, self._report, models=self._models)
            self._same_model(self._base.fingerprint)
            return replace(self._base, kept=reading)
        tokenizer = self._base.engine.loaded.tokenizer
        form = (request.chat, request.system, request.question)
        tokens = tokenize(prompt.source, tokenizer, None, request.max_new, *form, None, request.turns)
        if isinstance(previous, Prepared) and previous.kept is not None and previous.prompt.ids == tokens.ids:
            reading = previous.kept
        return replace(self._base, prompt=tokens, kept=reading)

    def _same_model(self, fingerprint: str) -> None:
        if self._info.fingerprint not in (None, fingerprint):
            model = self._plan.shared.model
            raise BadStudy(
                "model_changed", f"{model} has changed since study {self._info.id} began: begin a new study."
            )
