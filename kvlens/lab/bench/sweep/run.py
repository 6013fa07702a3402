"""Sweeps: method x budget x task x length x depth x seed. Resumable: a finished trial is on the disk before the next
one begins, and is known again by what was asked (method with its parameters, budget, model) and by its prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from kvlens.lab.bench import kept as lines_kept
from kvlens.lab.bench.sweep.place import Place
from kvlens.lab.bench.sweep.request import SweepRequest
from kvlens.lab.bench.sweep.work import lanes
from kvlens.lab.bench.trialprompts import Trial
from kvlens.workers.handing import hand_out
from kvlens.workers.lanes import Lane

Report = Callable[[int, int, dict[str, Any]], None]


@lines_kept.alone
def sweep(
    request: SweepRequest,
    path: Path,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
    open_lanes: Callable[[SweepRequest, Place], list[Lane]] = lanes,
    say: Callable[[str], None] = lines_kept.silent,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run what is not in `path` (one JSON line per trial) yet -> provenance and the rows of all trials asked for that
    are done.

    report(done, total, row) after each new trial; say(line) where kept trials are run again, and of methods that lack
    figures of the model. Ends early when
    `cancelled` says so or the minutes are over; nothing done is lost. Raises ValueError for a file that does not hold
    trials, and when a worker died (after the others have ended).
    """
    from kvlens.lab.bench.provenance import about, made_otherwise, origin
    from kvlens.lab.bench.trials import missing
    from kvlens.models.device import settle

    request = request.model_copy(update={"device": settle(request.device)})
    origins = {name: origin(request.model, name, request.device, request.dtype) for name in request.methods}
    rows = {row["key"]: row for row in lines_kept.read(path, ("key", "method", "origin"), lambda row: True)}
    place = Place(request.model, request.device, request.dtype, origins, str(runs_dir) if request.traces else None)
    groups = request.groups()
    target = {astuple(trial) for group in groups for trial in group}
    if line := made_otherwise((row for row in rows.values() if _asked(row) in target), origins):
        say(line)
    for line in missing(request.model, request.methods):
        say(line)
    total, result = sum(map(len, groups)), 0
    until = time.monotonic() + 60 * request.minutes

    def known_values(key: str) -> bool:
        nonlocal result
        row = rows.get(key)
        stored = row is not None and (not request.traces or "exact" not in row or _stored(runs_dir, row.get("uid")))
        result += stored
        return stored

    def finished(row: dict[str, Any]) -> None:
        nonlocal result
        result += 1
        row |= {"origin": origins[row["method"]]}
        rows[row["key"]] = row
        lines_kept.append(path, row)
        report(result, total, row)

    def stop() -> bool:
        return cancelled() or time.monotonic() > until

    sentence = "what was finished is kept: run the sweep again to go on"
    hand_out(open_lanes(request, place), groups, finished, stop, known_values, sentence)
    by_trial = {_asked(row): row for row in rows.values() if row["origin"] == origins.get(row["method"])}
    entries = [by_trial[astuple(trial)] for group in groups for trial in group if astuple(trial) in by_trial]
    product = about(request.methods, request.model) | {
        "request": request.model_dump(mode="json"),
        "origins": origins,
        "trials": len(entries),
        "planned": total,
    }
    return product, entries


def _asked(row: dict[str, Any]) -> tuple[Any, ...]:
    sentence = {"question": "in", "dtype": ""} | row
    return tuple(sentence.get(field.name) for field in fields(Trial))


def _stored(runs_dir: Path, uid: str | None) -> bool:
    return uid is not None and (runs_dir / uid / "trace.duckdb").is_file()
