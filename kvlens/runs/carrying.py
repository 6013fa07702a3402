"""One run from request to trace: foreseen, prepared, compared with its reference where that was asked for, stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import methods
from kvlens.memory.budget import BudgetInfeasible
from kvlens.methods.fitting import advised
from kvlens.models.device import settle
from kvlens.runs.freed import give_back
from kvlens.runs.preflight import refuse
from kvlens.runs.preparing import Pairing, Prepared, check, plan, prepare, sizes_of
from kvlens.runs.request import Report, RunRequest
from kvlens.text.prompts import PromptText

if TYPE_CHECKING:
    from kvlens.runs.storing import Stored


def _nobody(line: str) -> None:
    """Nobody asked what is worth knowing."""


def carry_out(
    request: RunRequest,
    source: PromptText,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    say: Callable[[str], None] = _nobody,
) -> tuple[str, str, str]:
    """Run and store; returns (uid, status, output text). report(phase, done, total): load, prefill, place, decode,
    store; before the run itself, where a full-KV run has to be made to compare with, `reference`, and `check` where
    only reading the prompt shows whether the method can keep to its budget. say(line): which parameters are run, where
    they are not the ones that the model usually gets.

    Raises ValueError (with one sentence) for whatever is wrong with the request, the prompt, the model or the budget;
    nothing is stored then, and what arithmetic can tell is told before the model is loaded. Raises the store's
    TraceError when the trace cannot be written.
    """
    check(request)
    refuse(request, source)
    request = request.model_copy(update={"device": settle(request.device)})
    prepared = prepare(request, source, report)
    planned = plan(request, prepared)
    if planned.chosen.said:
        say(planned.chosen.said)
    try:
        stored = _stored(request, prepared, runs_dir, report, cancelled)
    except BudgetInfeasible as error:
        method = methods.get(request.method)
        sizes = sizes_of(request, prepared)
        raise advised(method, request.preset, request.overrides, sizes, error.smallest) from None
    finally:
        give_back()
    return stored.uid, stored.status, stored.text


def _stored(
    request: RunRequest, prepared: Prepared, runs_dir: Path, report: Report, cancelled: Callable[[], bool]
) -> Stored:
    from kvlens.runs.reference import obtain, reference_key  # not above: a refusal need not wait for torch
    from kvlens.runs.storing import store

    pairing, forced = Pairing(reference_key=reference_key(request, prepared), holds=request.hold), None
    if request.against or request.forced_reference:
        reference = obtain(prepared, request, runs_dir, report, cancelled)
        forced = reference.ids if request.forced_reference else None
        pairing = replace(pairing, reference=reference, reference_uid=reference.uid)
    return store(prepared, request, plan(request, prepared, forced), pairing, runs_dir, report, cancelled)
