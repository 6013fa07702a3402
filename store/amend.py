"""Effects that are found after a run was stored: a copy of its trace that has them takes the trace's place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from kvlens.files import PLAIN, discard, open_file, sync_folder
from kvlens.instruments import Effects
from kvlens.store.errors import TraceError
from kvlens.store.outcomefacts import facts_entry
from kvlens.store.runinfo import Lease, freeze, read_info, write_info
from kvlens.store.schema import SCHEMA_VERSION
from kvlens.store.tracefile import TraceFile

LOCK = ".effects"
"""of a run's folder; held by the process that computes the effects"""
PENDING = "they are being computed"
"""why a stored trace has none yet (meta `no_effects`)"""
LEFT_OFF = "they were not stored: the process ended or the disk was full"
"""the same where nobody computes them"""
_COPIES = ".trace.*.duckdb*"
"""copies of a trace that are given its effects; one that is left over is of a process that was killed"""


@contextlib.contextmanager
def outstanding(folder: Path) -> Iterator[None]:
    """Hold the run's effects for this process: they are on their way. The kernel lets go however the process ends."""
    path = folder / LOCK
    with open(open_file(path, 0), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            discard(path)


def is_outstanding(folder: Path) -> bool:
    """Return whether some process computes the run's effects."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | PLAIN)
    except OSError:
        return False
    with open(descriptor, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def why_none(folder: Path, no_effects: str | None) -> str | None:
    """Return why a stored run has no effects, of what its meta says: PENDING only while some process computes them."""
    return LEFT_OFF if no_effects == PENDING and not is_outstanding(folder) else no_effects


def add_effects(folder: Path, effects: Effects | None, heads: tuple[int, int], extra: dict[str, Any]) -> None:
    """Replace a completed run's trace by a copy with its effects. Readers see the old trace or the new one.

    Args:
        effects: None: there are none; `extra` says why.
        heads: layers, KV heads.
        extra: values of the meta that change.

    Raises RunBusy where the run is deleted meanwhile, OSError, duckdb.Error or TraceError; the trace is the old one
    then."""
    trace, copy = folder / "trace.duckdb", folder / f".trace.{os.getpid()}.duckdb"
    with Lease(folder):
        _discard_copies(folder)
        try:
            shutil.copyfile(trace, copy)
            file = TraceFile.reopen(copy, SCHEMA_VERSION)
            try:
                file.amend(() if effects is None else (effects,), heads, extra)
                facts = file.outcome_facts(folder)
            finally:
                file.close()
            os.replace(copy, trace)
        except BaseException:
            _discard_copies(folder)
            raise
        freeze(folder)
        sync_folder(folder)
        info = read_info(folder)
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != LOCK)
        info |= {"disk_bytes": size, "extra": {**(info.get("extra") or {}), **extra}}
        write_info(folder, info | {"facts": facts_entry(facts, trace)}, durable=True)


def _discard_copies(folder: Path) -> None:
    for path in folder.glob(_COPIES):
        discard(path)


def amend(
    folder: Path, effects: Effects | None, heads: tuple[int, int], no_effects: str | None, seconds: float
) -> None:
    """Add to a stored run what came of its effects, found in so many seconds. A trace that cannot be replaced stays as
    it is: `is_outstanding` then tells that nobody computes them."""
    places = {} if effects is None else {"effect_steps": effects.steps, "effect_order": effects.order}
    with contextlib.suppress(OSError, duckdb.IOException, duckdb.OutOfMemoryException, TraceError):
        add_effects(folder, effects, heads, {"no_effects": no_effects, "effect_s": round(seconds, 4), **places})
