"""What commands share: options, the consoles, the runs folder, tables, how a command says what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlens.models.find import default_model
from kvlens.runs.folder import runs_folder as runs_folder
from kvlens.text.outfile import check_file
from kvlens.text.plaintext import terminal

RunsDir = Annotated[Path | None, typer.Option("--runs", help="Folder of the runs; default $KVLENS_RUNS, else ./runs.")]
Model = Annotated[str, typer.Option(help="A name (`kvlens models`), a local folder, a .gguf file or a hub id.")]
Device = Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu or cuda.")]
DEFAULT_MODEL = default_model()
"""what is run where no model is named"""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
ProgressJson = Annotated[
    bool, typer.Option("--progress-json", help="One JSON object per line on stdout instead of a bar.")
]

out = Console(width=None if sys.stdout.isatty() else 240)
err = Console(stderr=True, soft_wrap=True)


def fail(sentence: str) -> NoReturn:
    """One sentence on stderr and exit status 1."""
    err.print(f"kvlens: {terminal(sentence)}", markup=False, highlight=False)
    raise SystemExit(1)


def writable(path: Path | None) -> None:
    """The folders above the file that --out names, made where they are missing. ValueError, one sentence, where no file
    can be written there; None: standard output."""
    check_file(path, "--out")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)


WRAPPED_ROWS = 200
"""rows of a table that is fitted to the terminal, at most: fitting takes about a millisecond a row"""


def show_table(columns: list[str], rows: list[list[Any]]) -> None:
    """A table on stdout, one line per row. A long one is not fitted to the terminal's width."""
    if len(rows) > WRAPPED_ROWS:
        cells = [columns, *([_cell(value) for value in row] for row in rows)]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(set_cell_size(*pair) for pair in zip(row, widths, strict=True)).rstrip() for row in cells)
        typer.echo("\n".join(lines))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("uid", "family", "name", "parameter", "status"))
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    out.print(table)


def _cell(value: Any) -> str:
    return "" if value is None or value != value else terminal(value).replace("\n", " ")[:160]
