"""Tables of the bench as studies: a request is a stored study, and its trials are the rows of the table."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from kvlens import methods
from kvlens.lab.bench.provenance import made_otherwise, origin, weights
from kvlens.lab.bench.tablerequest import TableRequest
from kvlens.lab.bench.trials import missing, settings
from kvlens.models.device import settle
from kvlens.store.errors import RunNotFound
from kvlens.studies import storage
from kvlens.studies.extension import extend
from kvlens.studies.plan import Arm, StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.running import Part, carry_out
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.workers.lanes import Crew

Request = TypeVar("Request", bound="StudyRequest")
Say = Callable[[str], None]
Watch = Callable[[int, int, dict[str, Any]], None]
"""told of every new trial: (trials that have ended, all, the row)"""
RECORDED = {
    "score": "score",
    "coverage": "coverage",
    "selection_recall": "selection_recall",
    "attended_tokens": "attended_tokens",
    "resident_share": "resident_share",
    "read_share": "read_share",
    "read_bytes_per_step": "read_bytes_per_step",
    "h2d_bytes_per_step": "moved_bytes_per_step",
    "d2h_bytes_per_step": "offloaded_bytes_per_step",
    "prompt_tokens": "prompt_tokens",
    "steps": "steps",
    "output": "output",
    "batched": "batched",
    "passed": "checks_passed",
    "kl": "kl_mean_nats",
    "reused_share": "reused_share",
    "corrected_share": "corrected_share",
    "moved_share": "moved_share",
    "cold_share": "cold_share",
}
"""column of a result file -> figure of a study's trial (kvlens.studies.figures)"""
COMPARED = {
    "outcome": "outcome",
    "left_full_kv_at_step": "lost_at_step",
    "kl_at_loss_nats": "kl_at_loss_nats",
    "margin_logits": "margin_there",
    "at_stop_token": "at_stop_token",
}
"""the same of trials that are stored runs"""


def silent(line: str) -> None:
    """For measurements nobody listens to."""


@dataclass(frozen=True)
class Measured:
    """The rows of a table."""

    rows: Sequence[dict[str, Any]]
    origins: Mapping[str, str]
    """method -> what makes its trials comparable"""
    planned: int
    """trials of the whole table"""


class StudyRequest(Protocol):
    """What is to be measured as a study."""

    @property
    def model(self) -> str: ...
    @property
    def methods(self) -> tuple[str, ...]:
        """Return the methods whose trials are rows."""
        ...

    @property
    def question(self) -> str:
        """Return the place of the question; '': each arm has its own."""
        ...

    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def traces(self) -> bool: ...
    @property
    def minutes(self) -> float: ...
    def study_prompts(self) -> list[StudyPrompt]: ...
    def plan(self) -> StudyPlan: ...
    def arms(self) -> list[Arm]:
        """The arms of the plan whose trials are rows."""
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...


class _Audience:
    """Tells of every trial as a row."""

    def __init__(self, request: StudyRequest, watch: Watch) -> None:
        self._model, self._watch = request.model, watch

    def report(self, phase: str, number: int, total: int) -> None:
        """See kvlens.studies.running.Audience: a table follows no phases."""

    def trial(self, finished: int, total: int, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        """See kvlens.studies.running.Audience."""
        self._watch(finished, total, row_of(self._model, prompt, arm, trial))


def carry_out_table(
    kind: str,
    request: StudyRequest,
    runs_dir: Path,
    watch: Watch,
    say: Say = silent,
    crew: Crew | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Measured:
    """Run what the study of a table lacks, for `request.minutes` at most, and return its rows. A larger request adds to
    the study of a smaller one. Trials of other code, weights or parameters are run again, and `say` hears of them.

    Raises StudyBusy, ValueError and TraceError as kvlens.studies.running.carry_out does.
    """
    request = _settled(request)
    info, prompts = _study(kind, request, runs_dir)
    arms = {arm.key(): arm for arm in request.arms()}
    planned = set(request.plan().trials(prompt.id for prompt in prompts))
    order = [(prompt.id, key) for prompt in prompts for key in arms if (prompt.id, key) in planned]
    origins = {name: origin(request.model, name, request.device, request.dtype) for name in request.methods}
    stored = _rows(request, prompts, storage.read_trials(runs_dir, info.id), order)
    for line in filter(None, (made_otherwise(stored, origins), *missing(request.model, request.methods))):
        say(line)
    until = time.monotonic() + 60 * request.minutes

    def stop() -> bool:
        return cancelled() or time.monotonic() > until

    part = Part(frozenset(order), origins)
    carry_out(runs_dir, info.id, _Audience(request, watch), stop, crew=crew, part=part)
    rows = _rows(request, prompts, storage.read_trials(runs_dir, info.id), order)
    return Measured([row for row in rows if row["origin"] == origins[row["method"]]], origins, len(order))


def stored_rows(kind: str, request: TableRequest, runs_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of the trials that the study of a table has, in the order of its file, whatever code made them.
    Raises RunNotFound where nothing was measured."""
    request = _settled(request)
    study_id = study_name(kind, request)
    storage.read(runs_dir, study_id)
    prompts = storage.read_prompts(runs_dir, study_id)
    keys = {arm.key() for arm in request.arms()}
    places = set(request.places())
    table_prompts = [prompt for prompt in prompts if _place(prompt) in places]
    trials = storage.read_trials(runs_dir, study_id)
    return _rows(request, table_prompts, trials, [(trial.prompt, trial.arm) for trial in trials if trial.arm in keys])


def study_name(kind: str, request: StudyRequest) -> str:
    """Return the id of a table's study: kind and model in words, and a digest of all that its trials share."""
    shared = (request.model, weights(request.model), request.question, request.dtype, request.device, request.traces)
    digest = hashlib.sha256(json.dumps([kind, *shared]).encode()).hexdigest()[:8]
    stem = re.sub(r"[^0-9a-z]+", "-", f"{kind} {request.model}".lower())[-48:].strip("-")
    return f"{stem}-{digest}"


def _settled(request: Request) -> Request:
    """The request with the device that `auto` is here."""
    return request.model_copy(update={"device": settle(request.device)})


def _study(kind: str, request: StudyRequest, runs_dir: Path) -> tuple[StudyInfo, list[StudyPrompt]]:
    """The stored study, with all that the request asks for, and the request's prompts in their order."""
    study_id, plan = study_name(kind, request), request.plan().model_copy(update={"name": f"bench {kind}"})
    prompts = request.study_prompts()
    try:
        info = storage.read(runs_dir, study_id)
    except RunNotFound:
        info = storage.create(runs_dir, plan, prompts, study_id=study_id)
    else:
        info = extend(runs_dir, study_id, plan, prompts, key=_identity)
    stored_prompts = {_identity(prompt): prompt for prompt in storage.read_prompts(runs_dir, study_id)}
    return info, [stored_prompts[_identity(prompt)] for prompt in prompts]


def _identity(prompt: StudyPrompt) -> tuple[Any, ...]:
    return prompt.content, _place(prompt)


def _place(prompt: StudyPrompt) -> tuple[Any, ...]:
    return tuple(prompt.drawn.get(name) for name in ("task", "length", "depth", "seed", "index"))


def _rows(
    request: StudyRequest, prompts: Sequence[StudyPrompt], trials: Sequence[Trial], order: Collection[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The rows of the trials that ended, in this order of (prompt, arm)."""
    prompt_of = {prompt.id: prompt for prompt in prompts}
    arm_of = {arm.key(): arm for arm in request.arms()}
    trial_of = {(trial.prompt, trial.arm): trial for trial in trials if trial.ended and trial.prompt in prompt_of}
    return [
        row_of(request.model, prompt_of[prompt], arm_of[arm], trial_of[prompt, arm])
        for prompt, arm in order
        if (prompt, arm) in trial_of
    ]


def row_of(model: str, prompt: StudyPrompt, arm: Arm, trial: Trial) -> dict[str, Any]:
    """Return a trial as a row of a result file: what was asked, and the figures; `infeasible` (the smallest share that
    can be kept) where the budget was below it, `refused` (a sentence) where it could not be run. `exact` is None where
    the task could not score the output."""
    preset, overrides, rule = settings(methods.get(arm.method), model, arm.budget)
    row = {**prompt.drawn, "method": arm.method, "budget": arm.budget, "question": arm.question, "dtype": arm.dtype}
    row |= {"rule": rule, "origin": trial.origin, "prompt": prompt.id, "arm": arm.key()}
    figures = trial.figures or {}
    row |= {
        "preset": figures.get("ran_preset", arm.preset or preset),
        "overrides": {**(figures.get("fitted") or {}), **overrides},
    }
    if trial.state != "completed":
        if trial.smallest_share is not None:
            return row | {"infeasible": trial.smallest_share}
        return row | {"refused": trial.message or trial.state}
    row |= {column: figures[name] for column, name in RECORDED.items() if name in figures}
    score = figures.get("score")
    row |= {"exact": None if score is None else float(score == 1.0), "uid": trial.uid}
    row |= {"answer": (prompt.source.answer or "")[:200]}
    if trial.uid is not None:
        row |= {column: figures.get(name) for column, name in COMPARED.items()}
    return row
