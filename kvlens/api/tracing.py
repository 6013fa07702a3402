"""`kvlens.import_trace` and `kvlens.export_trace`: runs in the open format (docs/trace-format.md)."""

from __future__ import annotations

from pathlib import Path

from kvlens.api.asking import folder_of
from kvlens.api.errors import translated
from kvlens.api.models import Named
from kvlens.api.storedrun import Run


def import_trace(path: str | Path, *, runs: str | Path | None = None) -> Run:
    """Check a trace that another engine wrote, store it as a run and return the run.

    Args:
        path: its folder, with trace.json and the tables.
        runs: folder to store in; None: $KVLENS_RUNS, else ./runs.

    Raises:
        RunError: a code of docs/trace-format.md, such as `missing_table`; `values` name the table, row, column and
            rule. Nothing is stored then.
    """
    from kvlens.trace.limited import import_trace as store

    folder = folder_of(runs)
    with translated():
        uid = store(Path(path), folder)
    return Run(folder, uid, Named())


def export_trace(run: Run, path: str | Path) -> Path:
    """Write a stored run in the open format and return the folder. Raises RunError where the folder holds a trace or
    cannot be written."""
    from kvlens.trace.exporting import export_trace as write

    with translated():
        return write(run.reader, Path(path))
