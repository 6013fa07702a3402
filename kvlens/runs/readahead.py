"""A prompt read before its run is asked for, and answered by full KV where the run is to be compared with it: while a
person still looks at the form, so that the run begins with placing the prompt."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from kvlens.models.device import settle
from kvlens.refusal import Refusal
from kvlens.runs.aheadfiles import references
from kvlens.runs.memory import attended_share, attending, with_room
from kvlens.runs.preflight import refuse
from kvlens.runs.preparing import Prepared, check, plan, prepare, sizes_of
from kvlens.runs.readings import reading, shared
from kvlens.runs.reference import find, obtain, reference_key
from kvlens.runs.request import Report, RunRequest
from kvlens.text.prompts import PromptText


def read_ahead(request: RunRequest, source: PromptText, report: Report, cancelled: Callable[[], bool]) -> bool:
    """Read the prompt of `request` into the folder of readings that the environment names, with its surprisals, and run
    it under full KV where the request is to be compared with that. The runs' folder gets nothing of it. Return False
    where the run has to read its prompt itself (`reading`), or `cancelled` said so. Raises ValueError as the run
    would."""
    from kvlens.engine.options import Cancelled

    def go_on(phase: str, finished: int, total: int) -> None:
        if cancelled():
            raise Cancelled
        report(phase, finished, total)

    check(request)
    refuse(request, source)
    request = request.model_copy(update={"device": settle(request.device)})
    try:
        prepared = prepare(request, source, go_on)
        if attended_share(request.method, request.budget, request.overrides) is not None:
            request = attending(request)
        request = with_room(request, sizes_of(request, prepared))
        if request.against or request.forced_reference:
            return _answer(request, prepared, go_on, cancelled)
        reader = reading(prepared, plan(request, prepared), go_on, ahead=True)
        if reader is None:
            return False
        surprisal = reader().surprisal
        surprisal.whole(lambda finished, total: go_on("surprisal", finished, total))
        reader.learned(surprisal)
    except Cancelled:
        return False
    return True


def _answer(request: RunRequest, prepared: Prepared, report: Report, cancelled: Callable[[], bool]) -> bool:
    """Make the reference of a request's prompt beside the readings, where it takes the place of any other."""
    folder = references()
    if folder is None:
        return False
    if folder.is_dir() and find(folder, reference_key(request, prepared)) is None:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        obtain(shared(prepared, plan(request, prepared)), request, folder, report, cancelled)
    except Refusal:  # cancelled
        return False
    return True
