"""A stored run repeated beside its full-KV reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvlens.runs.lanes import SingleRun
from kvlens.runs.preparing import Pairing, plan, reference_key
from kvlens.runs.readings import shared
from kvlens.runs.reference import obtain
from kvlens.runs.repeat import read_run, reload
from kvlens.runs.request import Report
from kvlens.runs.storing import Stored, store
from kvlens.runs.watching import Audience


def pair(
    runs_dir: Path,
    uid: str,
    forced: bool,
    report: Report,
    cancelled: Callable[[], bool],
    audience: Audience | None = None,
) -> tuple[Stored, str]:
    """Repeat a stored run beside its full-KV reference, which is made where it is not stored -> (the new run, the
    reference's uid). audience: sees both, as a race of one."""
    past = read_run(runs_dir, uid)
    prepared = reload(past, report)
    prepared = shared(prepared, plan(past.request, prepared))
    request = past.request.model_copy(update={"against": True, "forced_reference": forced})
    watched = None if audience is None else SingleRun(audience, prepared, request, plan(request, prepared))
    reference = obtain(prepared, request, runs_dir, report, cancelled, None if watched is None else watched.full_kv)
    if watched is not None:
        watched.show_reference(runs_dir, reference)
    pairing = Pairing(reference, reference.uid, reference_key(request, prepared), uid, request.hold, request.drop)
    planned = plan(request, prepared, reference.ids if forced else None)
    watcher = None if watched is None else watched.run
    stored = store(prepared, request, planned, pairing, runs_dir, report, cancelled, watcher=watcher)
    if watched is not None:
        watched.end(stored)
    return stored, reference.uid
