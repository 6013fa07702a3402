"""The model of a study in its number formats, loaded once for all runners of a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens.models.device import settle
from kvlens.models.find import ready
from kvlens.models.sizes import check_dtype
from kvlens.runs.preparing import Prepared, prepare
from kvlens.runs.request import ModelSource, Report, RunRequest
from kvlens.studies import storage
from kvlens.studies.errors import BadStudy
from kvlens.studies.plan import StudyPlan
from kvlens.studies.storage import StudyInfo
from kvlens.text.prompts import PromptText

if TYPE_CHECKING:
    from kvlens.engine.batch import Seat


def check_loading(plan: StudyPlan) -> None:
    """Raise UnsupportedModel for a named model that is not on this machine, a device that the machine lacks, or an
    unknown number format. No model is loaded or converted."""
    settle(plan.shared.device)
    for dtype in dict.fromkeys(arm.dtype or plan.shared.dtype for arm in plan.arms()):
        check_dtype(dtype)
    ready(plan.shared.model)


class StudyModels:
    """Owns the loaded models. One thread at a time uses it."""

    def __init__(self, runs_dir: Path, info: StudyInfo, models: ModelSource) -> None:
        self._runs, self._info, self._models = runs_dir, info, models
        self._loaded: dict[str, Prepared] = {}
        """number format -> the model in it, with the prompt that it was loaded for; '' is the study's own"""
        self._threads = 1
        """of torch, as loading set them: each thread has a count of its own"""

    def __contains__(self, dtype: str) -> bool:
        return dtype in self._loaded

    @property
    def fingerprint(self) -> str | None:
        """Of the study's own model; None before it is loaded."""
        return self._loaded[""].fingerprint if "" in self._loaded else None

    def load(
        self, dtype: str, request: RunRequest, source: PromptText, report: Report, seat: Seat | None = None
    ) -> Prepared:
        """Return a model with a prompt, at a place among runs. Raises ValueError where it cannot be loaded, the prompt
        cannot be fed or its prompts cannot share steps; BadStudy `model_changed` where its weights are not those that
        the study began with."""
        import torch

        prepared = prepare(request, source, report, models=self._models)
        if seat is not None:
            seat.check(prepared.engine.loaded)
        prepared = replace(prepared, readings=storage.readings_folder(self._runs))
        if not dtype and self._info.fingerprint not in (None, prepared.fingerprint):
            model = self._info.plan.shared.model
            sentence = f"{model} has changed since study {self._info.id} began: begin a new study."
            raise BadStudy("model_changed", sentence)
        self._threads = torch.get_num_threads()
        self._loaded[dtype] = prepared
        return self.find(dtype, seat)

    def find(self, dtype: str, seat: Seat | None = None) -> Prepared:
        """Return a loaded model for runs of this thread, at a place among runs."""
        import torch

        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        prepared = self._loaded[dtype]
        return prepared if seat is None else replace(prepared, engine=prepared.engine.seated(seat))
