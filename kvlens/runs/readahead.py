"""A prompt read before its run is asked for: while a person still looks at the form, so that the run begins with
placing it."""

from __future__ import annotations

from collections.abc import Callable

from kvlens.models.device import settle
from kvlens.runs.memory import attended_share, attending, with_room
from kvlens.runs.preflight import refuse
from kvlens.runs.preparing import check, plan, prepare, sizes_of
from kvlens.runs.readings import reading
from kvlens.runs.request import Report, RunRequest
from kvlens.text.prompts import PromptText


def read_ahead(request: RunRequest, source: PromptText, report: Report, cancelled: Callable[[], bool]) -> bool:
    """Read the prompt of `request` into the folder of readings that the environment names, with its surprisals. Nothing
    is placed, run or stored. Return False where the run has to read its prompt itself (`reading`), or `cancelled` said
    so. Raises ValueError as the run would."""
    from kvlens.engine.options import Cancelled

    def go_on(phase: str, finished: int, total: int) -> None:
        if cancelled():
            raise Cancelled
        report(phase, finished, total)

    check(request)
    refuse(request, source)
    request = request.model_copy(update={"device": settle(request.device)})
    prepared = prepare(request, source, go_on)
    if attended_share(request.method, request.budget, request.overrides) is not None:
        request = attending(request)
    reader = reading(prepared, plan(with_room(request, sizes_of(request, prepared)), prepared), go_on, ahead=True)
    if reader is None:
        return False
    try:
        surprisal = reader().surprisal
        surprisal.whole(lambda finished, total: go_on("surprisal", finished, total))
        reader.learned(surprisal)
    except Cancelled:
        return False
    return True
