"""kvlens report: a run, or two beside each other, as one self-contained HTML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvlens.cli.options import RunsDir, runs_folder, writable


def report(
    uid: str,
    to: Annotated[Path, typer.Option("--out", help="The HTML file to write.")],
    against: Annotated[str | None, typer.Option(help="uid of a second run to lay beside it.")] = None,
    runs: RunsDir = None,
) -> None:
    """Write a report to hand to a colleague: one HTML file that fetches nothing. Prints its size in bytes."""
    from kvlens.app.report import report_bytes
    from kvlens.store.reader import TraceReader

    writable(to)
    folder = runs_folder(runs)
    with TraceReader.open(folder, uid) as reader:
        if against is None:
            made = report_bytes(reader)
        else:
            with TraceReader.open(folder, against) as other:
                made = report_bytes(reader, other)
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        temporary.write_bytes(made)
        os.replace(temporary, to)
    finally:
        temporary.unlink(missing_ok=True)
    typer.echo(f"{to}: {len(made):,} bytes")
