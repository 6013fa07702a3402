"""`kvlens check-trace` and `kvlens import`: traces of the open format (docs/trace-format.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvlens.cli.options import AsJson, RunsDir, err, runs_folder
from kvlens.text.plaintext import json_text, terminal

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder with trace.json and the trace's tables.")]


def check_trace(folder: Folder, as_json: AsJson = False) -> None:
    """Check a trace that another engine wrote, and name the row, column and rule of each fault. Exit status 1 if there
    is one."""
    from kvlens.trace.faults import BadTrace
    from kvlens.trace.limited import check_trace as check

    try:
        summary = check(folder)
    except BadTrace as bad:
        if as_json:
            typer.echo(json_text({"faults": [asdict(fault) | {"sentence": fault.sentence} for fault in bad.faults]}))
        else:
            for fault in bad.faults:
                typer.echo(fault.sentence)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json_text(summary | {"faults": []}))
        return
    tables = ", ".join(f"{name} {rows:,}" for name, rows in summary["rows"].items())
    ending = "complete" if summary["complete"] else "cut off: its committed steps can be imported"
    typer.echo(f"{terminal(summary['engine'])}: {summary['steps']:,} steps, {ending}")
    typer.echo(f"rows: {tables}")


def import_trace(folder: Folder, runs: RunsDir = None) -> None:
    """Check a trace that another engine wrote and store it as a run. The last line of stdout is the run's uid."""
    from kvlens.trace.faults import BadTrace
    from kvlens.trace.limited import import_trace as store

    try:
        uid = store(folder, runs_folder(runs))
    except BadTrace as bad:
        for fault in bad.faults[1:]:
            err.print(f"kvlens: {fault.sentence}", markup=False, highlight=False)
        raise
    typer.echo(uid)


def export_folder(uids: Sequence[str], runs_dir: Path, folder: Path | None) -> None:
    """Write one run in the open format into a folder. Raises BadParameter for several runs or no folder."""
    from kvlens.store.reader import TraceReader
    from kvlens.trace.exporting import export_trace

    if len(uids) != 1 or folder is None:
        raise typer.BadParameter("--what trace takes one run and --out FOLDER.")
    with TraceReader.open(runs_dir, uids[0]) as reader:
        export_trace(reader, folder)
