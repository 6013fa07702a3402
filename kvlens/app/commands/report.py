"""kvlens report: a run, or two beside each other, as one self-contained HTML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvlens.cli.options import RunsDir, runs_folder, writable


def report(
    uid: str,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="The HTML file to write; by default kvlens-UID.html or kvlens-UID-replay.html."),
    ] = None,
    against: Annotated[str | None, typer.Option(help="uid of a second run to lay beside it.")] = None,
    player: Annotated[bool, typer.Option("--player", help="Write the replay that plays step by step instead.")] = False,
    runs: RunsDir = None,
) -> None:
    """Write a report to hand to a colleague: one HTML file that fetches nothing. Prints its size in bytes."""
    if player and against is not None:
        raise ValueError("A replay shows one run; leave out --against or --player.")
    out = to or Path(f"kvlens-{Path(uid).name}{'-replay' if player else ''}.html")
    writable(out)
    document = _document(runs_folder(runs), uid, against, player)
    from kvlens.files import discard

    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_bytes(document)
        os.replace(temporary, out)
    finally:
        discard(temporary)
    typer.echo(f"{out}: {len(document):,} bytes")


def _document(folder: Path, uid: str, against: str | None, player: bool) -> bytes:
    """Return the HTML file, UTF-8."""
    from kvlens.app.report import report_bytes
    from kvlens.player.page import player_html
    from kvlens.store.reader import TraceReader

    with TraceReader.open(folder, uid) as reader:
        if player:
            return player_html(reader).encode("utf-8")
        if against is None:
            return report_bytes(reader)
        with TraceReader.open(folder, against) as other_reader:
            return report_bytes(reader, other_reader)
