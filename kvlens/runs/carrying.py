"""One run from request to trace: prepared, compared with its reference where that was asked for, stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvlens.models.device import settle
from kvlens.prompts import PromptText
from kvlens.runs.preparing import Pairing, check, plan, prepare
from kvlens.runs.reference import obtain, reference_key
from kvlens.runs.request import Report, RunRequest
from kvlens.runs.storing import store


def carry_out(
    request: RunRequest, source: PromptText, runs_dir: Path, report: Report, cancelled: Callable[[], bool]
) -> tuple[str, str, str]:
    """Run and store; returns (uid, status, output text). report(phase, done, total): load, prefill, place, decode,
    store; before the run itself, where a full-KV run has to be made to compare with, `reference`, and `check` where
    only reading the prompt shows whether the method can keep to its budget.

    Raises ValueError (with one sentence) for whatever is wrong with the request, the prompt, the model or the budget;
    nothing is stored then. Raises the store's TraceError when the trace cannot be written.
    """
    check(request)
    request = request.model_copy(update={"device": settle(request.device)})
    prepared = prepare(request, source, report)
    pairing, forced = Pairing(reference_key=reference_key(request, prepared), holds=request.hold), None
    if request.against or request.forced_reference:
        reference = obtain(prepared, request, runs_dir, report, cancelled)
        forced = reference.ids if request.forced_reference else None
        pairing = replace(pairing, reference=reference, reference_uid=reference.uid)
    stored = store(prepared, request, plan(request, forced), pairing, runs_dir, report, cancelled)
    return stored.uid, stored.status, stored.text
