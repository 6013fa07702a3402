"""After a crash: finishing what a dead process left behind, and deleting runs."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import duckdb

from kvlens.store.attach import unreadable
from kvlens.store.errors import RunBusy, TraceError, UnreadableRun
from kvlens.store.lease import Lease
from kvlens.store.runinfo import freeze, read_info, run_dir, sentence, write_info
from kvlens.store.schema import SCHEMA_VERSION
from kvlens.store.tracefile import TraceFile

_ENDED = ("completed", "cancelled")


def recover(runs_dir: Path, uid: str) -> int:
    """Makes an interrupted run whole up to its last flushed step, and returns the number of steps it holds.

    The run keeps saying that it was interrupted (or that it failed); run.json also says that it was recovered.
    """
    folder = run_dir(Path(runs_dir), uid)
    with Lease(folder):
        info = _info(folder)
        if info.get("recovered") or info["status"] in _ENDED:
            raise TraceError(f"Run {uid} is {info['status']} and whole; there is nothing to recover.")
        if not (folder / "trace.duckdb").is_file():
            raise UnreadableRun(f"Run {uid} ended before its trace was made; delete it and run again.")
        status = "failed" if info["status"] == "failed" else "interrupted"
        (folder / ".reserve").unlink(missing_ok=True)
        try:
            file = TraceFile.reopen(folder / "trace.duckdb")
            try:
                ended = file.ended()
                if ended is not None:  # the process died between its last commit and run.json
                    status, error = ended
                else:
                    error = info.get("error") or "The process that wrote this run ended before it could finish it."
                    file.finish(status, error, [], {"recovered": True}, info.get("trace_level", "spans"))
                totals, steps = file.totals(), file.last_step() + 1
            finally:
                file.close()
        except duckdb.Error as problem:
            raise unreadable(uid, problem) from problem
        info |= totals | {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "error": error,
            "recovered": True,
            "steps": steps,
        }
        info["progress"] = {"step": steps, "max_new": info.get("max_new")}
        info["disk_bytes"] = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        write_info(folder, info, durable=True)
        freeze(folder)
    return steps


def _info(folder: Path) -> dict[str, Any]:
    try:
        return read_info(folder)
    except UnreadableRun:
        return {"schema_version": SCHEMA_VERSION, "uid": folder.name, "status": "interrupted"}


def delete_run(runs_dir: Path, uid: str) -> None:
    """Deletes a run's folder; a run that is being written is refused."""
    folder = run_dir(Path(runs_dir), uid)
    if folder.is_symlink():
        raise TraceError(f"Run {uid} is a link to another folder; remove the link yourself.")
    with Lease(folder):
        try:
            # run.json first: half a deletion then leaves a run that says it cannot be read, not one that looks whole
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / "run.json")
            shutil.rmtree(folder)
        except OSError as error:
            raise TraceError(
                f"Run {uid} could not be deleted whole ({sentence(error)}); delete its folder yourself."
            ) from error


__all__ = ["RunBusy", "delete_run", "recover"]
