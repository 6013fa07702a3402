"""After a crash: finishing what a dead process left behind, and deleting runs."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from kvlens.files import ordinary
from kvlens.store import queries, walmend
from kvlens.store.attach import check_tables, linked, read_meta, stored_steps, unmade, unreadable
from kvlens.store.errors import RunBusy, TraceError, UnreadableRun, sentence
from kvlens.store.guarded import guarded
from kvlens.store.outcomefacts import facts_entry
from kvlens.store.reader import TraceReader
from kvlens.store.runinfo import Lease, freeze, read_info, run_dir, write_info
from kvlens.store.schema import SCHEMA_VERSION
from kvlens.store.tracefile import TraceFile

_ENDED = ("completed", "cancelled")


@dataclass(frozen=True)
class Recovered:
    """What a recovery kept, and what it could not."""

    steps: int
    """readable now"""
    lost: str | None
    """a sentence; None when nothing that was committed is missing"""


def recover(runs_dir: Path, uid: str) -> Recovered:
    """Makes an interrupted run whole up to its last committed step.

    The run keeps saying that it was interrupted (or that it failed); run.json also says that it was recovered, and what
    was lost. The file is looked at behind the reader's walls first: one that kvlens did not write, or a later kvlens,
    is refused as it is. Nothing is deleted, and a recovery that fails or is killed can be tried again.

    Raises TraceError: nothing_to_recover for a run that came to its end and whose trace opens."""
    folder = run_dir(Path(runs_dir), uid)
    if _is_whole(_info(folder)):
        TraceReader.open(folder.parent, uid).close()  # says what is wrong with a trace that was changed since
    with Lease(folder):
        info = _info(folder)
        if _is_whole(info):
            raise TraceError(
                f"Run {uid} is {info['status']} and whole; there is nothing to recover.",
                code="nothing_to_recover",
                uid=uid,
            )
        trace = folder / "trace.duckdb"
        if not ordinary(trace):
            raise linked(uid) if trace.is_symlink() else unmade(uid)
        status = "failed" if info["status"] == "failed" else "interrupted"
        (folder / ".reserve").unlink(missing_ok=True)
        try:
            cut = walmend.mend(trace)
            version, steps = _looked_at(trace, uid)
            lost = _lost(trace, cut, steps, info.get("steps"))
            file = TraceFile.reopen(trace, version)
            try:
                ended = file.ended()
                if ended is not None:  # the process died between its last commit and run.json
                    status, error = ended
                else:
                    error = info.get("error") or "The process that wrote this run ended before it could finish it."
                    error = f"{error} {lost}" if lost else error
                    file.finish(status, error, [], {"recovered": True}, info.get("trace_level", "spans"))
                totals, facts = file.totals(), file.outcome_facts(folder)
            finally:
                file.close()
        except duckdb.Error as problem:
            raise unmade(uid) if info["status"] == "created" else unreadable(uid, problem) from problem
        except OSError as problem:
            raise TraceError(
                f"Run {uid} could not be recovered ({sentence(problem)}); free disk space and try again, what it holds "
                f"is kept."
            ) from problem
        info |= totals | {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "error": error,
            "recovered": True,
            "steps": steps,
        }
        info["progress"] = {"step": steps, "max_new": info.get("max_new")}
        info["facts"] = facts_entry(facts, trace)
        info["disk_bytes"] = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        try:
            write_info(folder, info, durable=True)
        except OSError as problem:
            raise TraceError(
                f"Run {uid} is recovered, and run.json could not be told ({sentence(problem)}); free disk space and "
                f"recover it again."
            ) from problem
        freeze(folder)
    return Recovered(steps, lost)


def _is_whole(info: dict[str, Any]) -> bool:
    """Return True if the run came to its end, or was recovered."""
    return bool(info.get("recovered")) or info["status"] in _ENDED


def _looked_at(trace: Path, uid: str) -> tuple[int | None, int]:
    """(schema, steps) of a file that may be finished. Raises TraceError, and leaves it as it is, otherwise."""
    con = guarded(trace, read_only=True)
    try:
        version = check_tables(con, trace.parent)
        if con.execute(queries.MORE_THAN_TABLES).fetchall():
            raise UnreadableRun(
                f"The trace of run {uid} holds views or macros, which kvlens does not write; it is left as it is."
            )
        read_meta(con, uid)
        return version, stored_steps(con, uid)[1]
    finally:
        con.close()


def _lost(trace: Path, cut: int, steps: int, value: object) -> str | None:
    """What is lost of a run. `cut`: bytes of its log that were not replayed; `value`: steps that run.json counted as
    committed. A log whose very beginning is damaged DuckDB passes over in silence, and then drops."""
    missing = value - steps if isinstance(value, int) and not isinstance(value, bool) else 0
    if not cut and missing <= 0:
        return None
    if not cut and ordinary(trace.with_name(f"{trace.name}.wal")):
        walmend.keep(trace)
    where = f"the last {cut:,} bytes of its log" if cut else "its log"
    how_many = f"at least {missing:,} of its committed steps" if missing > 0 else "what was committed there"
    kept_tokens = f"; the log stays in {walmend.KEPT}" if ordinary(trace.with_name(walmend.KEPT)) else ""
    return f"Damage to {where} took {how_many}{kept_tokens}."


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


__all__ = ["Recovered", "RunBusy", "delete_run", "recover"]
