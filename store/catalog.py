"""The list of runs, from their run.json and about.json files alone: no trace is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvlens.store.about import About, read_about
from kvlens.store.errors import TraceError
from kvlens.store.lease import is_held
from kvlens.store.runinfo import CREATED_US, SUMMARY, check_uid, read_info

ABOUT = ("name", "note", "tags", "about_error")
"""what about.json adds to a row; about_error: one sentence where it cannot be read, else None"""
_ALIVE = ("created", "running", "finalizing")
_TEXTS = (
    "model",
    "method",
    "preset",
    "stand_in",
    "dtype",
    "task",
    "output_text",
    "error",
    "reference",
    "parent",
    "reference_key",
)
_NUMBERS = (
    "prompt_tokens",
    "steps",
    "max_new",
    "duration_s",
    "peak_bytes",
    "full_kv_bytes",
    "budget_bytes",
    "h2d_bytes",
    "d2h_bytes",
    "disk_bytes",
)


def derived_status(folder: Path, status: str) -> str:
    """'interrupted' for a run that says it is being written while nobody writes it."""
    return "interrupted" if status in _ALIVE and not is_held(folder) else status


def list_runs(runs_dir: Path) -> pd.DataFrame:
    """Return one row per run, newest first: by `created`, then by its microsecond where run.json records it.

    A run whose run.json cannot be read is a row with status 'unreadable' and the reason; one whose about.json cannot be
    read has no name, and the reason."""
    rows: list[dict[str, Any]] = []
    root = Path(runs_dir)
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    for folder in folders:
        try:
            check_uid(folder.name)
        except TraceError:
            continue
        rows.append(_row(folder) | _about(folder))
    frame = pd.DataFrame(rows, columns=[*SUMMARY, *ABOUT, CREATED_US])
    for name in (*_NUMBERS, CREATED_US):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    keys = ["created", CREATED_US, "uid"]
    return frame.sort_values(keys, ascending=False, na_position="last", ignore_index=True).drop(columns=CREATED_US)


def _about(folder: Path) -> dict[str, Any]:
    try:
        about, error = read_about(folder), None
    except TraceError as problem:
        about, error = About(), str(problem)
    return dict(zip(ABOUT, (about.name, about.note, about.tags, error), strict=True))


def _row(folder: Path) -> dict[str, Any]:
    try:
        info = read_info(folder)
    except TraceError as error:
        return {"uid": folder.name, "status": "unreadable", "created": "", "error": str(error)}
    row = {name: info.get(name) for name in SUMMARY}
    row |= {
        "uid": folder.name,
        "status": derived_status(folder, info["status"]),
        "created": str(info.get("created") or ""),
    }
    for name in _TEXTS:
        row[name] = None if row[name] is None else str(row[name])
    row |= {name: bool(row[name]) for name in ("forced", "hold", "drop", "changed")}
    row["budget"] = None if row["budget"] is None else str(row["budget"])
    row |= {name: _number(row[name], whole=name != "duration_s") for name in _NUMBERS}
    return row | {CREATED_US: _number(info.get(CREATED_US), whole=True)}


def _number(value: object, whole: bool) -> float | None:
    """A count or a duration as kvlens writes it; None for whatever else a run.json may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 62:
        return None
    return None if whole and value != int(value) else float(value)
