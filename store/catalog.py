"""The list of runs, from their run.json and about.json files alone: no trace is opened. What was read is kept in the
folder's catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvlens.store.about import About, read_about
from kvlens.store.catalogueentry import ABOUT, FLAGS, NUMBERS, TEXTS, UNREADABLE, Entry
from kvlens.store.errors import TraceError
from kvlens.store.outcomefacts import OutcomeFacts, stored_facts, trace_stamp
from kvlens.store.runcatalogue import catalogue_of
from kvlens.store.runinfo import CREATED_US, SUMMARY, is_held, read_info

_ALIVE = ("created", "running", "finalizing")


def derived_status(folder: Path, status: str) -> str:
    """'interrupted' for a run that says it is being written while nobody writes it."""
    return "interrupted" if status in _ALIVE and not is_held(folder) else status


def list_runs(runs_dir: Path) -> pd.DataFrame:
    """Return one row per run, newest first: by `created`, then by its microsecond where run.json records it.

    A run whose run.json cannot be read is a row with status 'unreadable' and the reason; one whose about.json cannot be
    read has no name, and the reason."""
    rows = [_now(Path(runs_dir), entry.row) for entry in run_entries(Path(runs_dir))]
    frame = pd.DataFrame(rows, columns=[*SUMMARY, *ABOUT, CREATED_US])
    for name in (*NUMBERS, CREATED_US):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    keys = ["created", CREATED_US, "uid"]
    return frame.sort_values(keys, ascending=False, na_position="last", ignore_index=True).drop(columns=CREATED_US)


def run_entries(runs_dir: Path) -> list[Entry]:
    """Return the catalogue's entry of each run of a folder; runs that changed since the last look are read again."""
    return catalogue_of(runs_dir).entries(_read)


def _now(root: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the status that the run has now: a process that wrote it may have ended."""
    return row | {"status": derived_status(root / row["uid"], row["status"])} if row["status"] in _ALIVE else row


def _read(folder: Path) -> tuple[dict[str, Any], tuple[tuple[int, int], OutcomeFacts] | None]:
    """Return the row of a run, and its facts with the stamp of their trace if run.json holds them."""
    try:
        info = read_info(folder)
    except TraceError as error:
        unread = {"uid": folder.name, "status": UNREADABLE, "created": "", "error": str(error)}
        return unread | _about(folder), None
    trace = trace_stamp(folder / "trace.duckdb")
    facts = stored_facts(info, trace)
    return _row(folder, info) | _about(folder), None if facts is None or trace is None else (trace, facts)


def _about(folder: Path) -> dict[str, Any]:
    try:
        about, error = read_about(folder), None
    except TraceError as problem:
        about, error = About(), str(problem)
    return dict(zip(ABOUT, (about.name, about.note, about.tags, error), strict=True))


def _row(folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    extra = info.get("extra")
    row = {name: info.get(name) for name in SUMMARY}
    row["batched"] = extra.get("batched") if isinstance(extra, dict) else None
    row |= {"uid": folder.name, "status": info["status"], "created": str(info.get("created") or "")}
    for name in TEXTS:
        row[name] = None if row[name] is None else str(row[name])
    row |= {name: bool(row[name]) for name in FLAGS}
    row |= {name: _number(row[name], whole=name != "duration_s") for name in NUMBERS}
    return row | {CREATED_US: _number(info.get(CREATED_US), whole=True)}


def _number(value: object, whole: bool) -> float | None:
    """A count or a duration as kvlens writes it; None for whatever else a run.json may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 62:
        return None
    return None if whole and value != int(value) else float(value)
