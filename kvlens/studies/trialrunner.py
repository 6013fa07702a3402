"""Runs single trials of a study: the model is loaded once, a prompt is read once for all its arms, full KV runs first,
and every trial is an ordinary stored run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.methods.faults import MethodFault, stray
from kvlens.models.device import give_back_heap
from kvlens.refusal import Refusal
from kvlens.runs.preparing import Pairing, Plan, Prepared, advice, check, plan, reference_key, sizes_of
from kvlens.runs.readings import keeping
from kvlens.runs.request import BY_NAME, ModelSource, Report, RunRequest
from kvlens.shortage import Shortage
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.studies.errors import BadStudy
from kvlens.studies.figures import figures_of
from kvlens.studies.models import StudyModels
from kvlens.studies.plan import Arm, StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.scoring import Scorer, settings_of
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.studies.trialplan import plan_trial, request_of, tokens_of
from kvlens.text.carried import FAULTS
from kvlens.text.chat import BadTemplate
from kvlens.text.prompts import BadPrompt
from kvlens.text.segments import BadSegment

if TYPE_CHECKING:
    from kvlens.engine.batch import Seat
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
        models: ModelSource | StudyModels = BY_NAME,
        seat: Seat | None = None,
    ) -> None:
        """models: shared with other runners where it is a StudyModels. seat: the runner's place among those whose steps
        are computed together; None: its trials decode alone."""
        self._runs, self._report, self._cancelled, self._seat = runs_dir, report, cancelled, seat
        self._models = models if isinstance(models, StudyModels) else StudyModels(runs_dir, info, models)
        self._plan: StudyPlan = info.plan
        self._arms = self._plan.arms()
        self._place: tuple[str, str, str] | None = None
        """(prompt, place of the question, number format) of what is prepared"""
        self._prepared: Prepared | str = ""
        """the model with the prompt; a sentence where it cannot be fed"""
        self._references: dict[int, Reference | Trial] = {}
        """seed -> full KV's run, or the trial of an arm that cannot be compared with one"""
        self._forced: tuple[int, ...] | None = None
        """ids that every arm of the prompt is fed; None: arms choose their own"""
        self._full: Reference | None = None
        """full KV on the forced text"""
        self._last: Prepared | None = None
        """of the prompt that was prepared last: the next one may begin with the same tokens"""
        self._scorer = Scorer()

    @property
    def fingerprint(self) -> str | None:
        """Of the model; None before the first trial."""
        return self._models.fingerprint

    def trial(self, prompt: StudyPrompt, arm: Arm) -> Trial | None:
        """Run a trial; None where it was cancelled. Whatever goes wrong in a method's hook is its own trial's.

        Raises ValueError where the model cannot be loaded, BadStudy `model_changed` where its weights are not those
        that the study began with.
        """
        prepared = self._prompt(prompt, arm)
        if isinstance(prepared, str):
            return Trial(prompt.id, arm.key(), "refused", message=prepared)
        if not self._plan.traces or prompt.forced:
            return self._run_unstored(prompt, prepared, arm)
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
        self._full = None
        give_back_heap()

    def _prompt(self, prompt: StudyPrompt, arm: Arm) -> Prepared | str:
        place = prompt.id, arm.question, arm.dtype
        if self._place != place:
            if self._place is not None:
                self.end_prompt()
            full = Arm(method=methods.REFERENCE, question=arm.question, dtype=arm.dtype)
            arms = [each for each in self._arms if (each.question, each.dtype) == place[1:]]
            try:
                self._prepared = self._prepare(prompt, self._request(prompt, full), arms, arm.dtype)
            except ValueError as error:
                if isinstance(error, BadStudy) or not (arm.dtype in self._models or _is_of(prompt, error)):
                    raise  # the model, not the prompt
                self._prepared = str(error)
            self._place = place
        return self._prepared

    def _request(self, prompt: StudyPrompt, arm: Arm) -> RunRequest:
        """A trial's run. Phases of a step that serves several runs would hold the time of all."""
        request = request_of(self._plan, prompt, arm)
        return request if self._seat is None else request.model_copy(update={"phases": False})

    def _reference(self, prompt: StudyPrompt, arm: Arm, prepared: Prepared) -> Reference | Trial | None:
        """Full KV's run that an arm is compared with; a trial that says why there is none; None: cancelled."""
        from kvlens.runs.reference import obtain

        if arm.seed in self._references:
            return self._references[arm.seed]
        full = Arm(method=methods.REFERENCE, question=arm.question, seed=arm.seed, dtype=arm.dtype)
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
        planned: Plan | None = None
        try:
            check(request)
            planned = plan_trial(self._plan, arm, request, prepared)
            pairing = Pairing(reference, reference.uid, reference_key(request, prepared))
            stored = store(prepared, request, planned, pairing, self._runs, self._report, self._cancelled)
        except BaseException as error:
            fault = stray(arm.method, error)
            if not isinstance(fault, Exception):
                raise
            return None if self._cancelled() else self._stopped(prompt, prepared, arm, request, fault, planned)
        return self._completed(prompt, arm, stored.uid, planned) if stored.status == "completed" else None

    def _run_unstored(self, prompt: StudyPrompt, prepared: Prepared, arm: Arm) -> Trial | None:
        """The trial of an arm whose figures alone are kept; None where it was cancelled."""
        from kvlens.studies.unstored import forced_reference, measure

        request = self._request(prompt, arm).model_copy(update={"oracle": "off", "phases": False})
        planned: Plan | None = None
        try:
            check(request)
            planned = plan_trial(self._plan, arm, request, prepared, self._forced)
            if self._forced is not None and self._full is None:
                self._full = forced_reference(prepared, planned, self._cancelled)
            figures = measure(prepared, planned, prompt, self._cancelled, self._full)
        except BaseException as error:
            fault = stray(arm.method, error)
            if not isinstance(fault, Exception):
                raise
            return None if self._cancelled() else self._stopped(prompt, prepared, arm, request, fault, planned)
        return self._ended(prompt, arm, figures, planned)

    def _stopped(
        self,
        prompt: StudyPrompt,
        prepared: Prepared,
        arm: Arm,
        request: RunRequest,
        error: Exception,
        planned: Plan | None,
    ) -> Trial:
        """A trial that did not come to its end. planned: as far as it came."""
        smallest = None
        if isinstance(error, BudgetInfeasible):
            smallest = round(error.smallest / error.full, 4)
            error = advice(request, sizes_of(request, prepared), error.smallest)
        if isinstance(error, Shortage | TraceError | MethodFault):
            return Trial(prompt.id, arm.key(), "failed", message=str(error))
        if isinstance(error, ValueError):
            figures = None if planned is None else settings_of(planned)
            return Trial(prompt.id, arm.key(), "refused", None, str(error), figures, smallest)
        traceback.print_exception(error)
        return Trial(prompt.id, arm.key(), "failed", message=f"{type(error).__name__}: {error}")

    def _completed(self, prompt: StudyPrompt, arm: Arm, uid: str, planned: Plan | None = None) -> Trial:
        with TraceReader.open(self._runs, uid) as reader:
            return self._ended(prompt, arm, figures_of(reader), planned, uid)

    def _ended(
        self, prompt: StudyPrompt, arm: Arm, figures: dict[str, Any], planned: Plan | None, uid: str | None = None
    ) -> Trial:
        """The trial of these figures, with the task's own score and what the preset chose. planned: None of full
        KV."""
        if prompt.drawn:
            tokenizer = self._models.find(arm.dtype).engine.loaded.tokenizer
            figures["score"] = self._scorer.score(prompt, str(figures["whole_output"]), tokenizer)
        if planned is not None:
            figures |= settings_of(planned)
        figures.pop("whole_output", None)
        return Trial(prompt.id, arm.key(), "completed", uid, figures=figures)

    def _prepare(self, prompt: StudyPrompt, request: RunRequest, arms: list[Arm], dtype: str) -> Prepared:
        """The loaded model with the prompt, whose reading serves all methods that are to come. Raises ValueError."""
        reading = keeping([methods.get(arm.method) for arm in arms])
        if dtype not in self._models:
            self._models.load(dtype, request, prompt.source, self._report, self._seat)
        base = self._models.find(dtype, self._seat)
        tokens, self._forced = tokens_of(prompt, request, base.engine.loaded.tokenizer)
        last = self._last
        if last is not None and last.prompt.ids == tokens.ids and last.engine.loaded is base.engine.loaded:
            reading = last.kept or reading  # another question about the same context
        self._last = replace(base, prompt=tokens, kept=reading)
        return self._last


def _is_of(prompt: StudyPrompt, error: ValueError) -> bool:
    """Return True if the error is the prompt's own, so that the study's other prompts may run."""
    own_form = prompt.system is not None or prompt.turns
    if isinstance(error, Refusal) and error.code in FAULTS:
        return True
    return isinstance(error, BadPrompt | BadSegment | BadTemplate if own_form else BadPrompt | BadSegment)
