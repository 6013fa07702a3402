"""`kvlens models`: the models that have a name here, what they are, and names of one's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

models_app = typer.Typer(help="List, show, add and remove models.", invoke_without_command=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@models_app.callback()
def top(context: typer.Context, as_json: AsJson = False) -> None:
    """Without a command: list the models."""
    if context.invoked_subcommand is None:
        list_(as_json)


@models_app.command("list")
def list_(as_json: AsJson = False) -> None:
    """The models that have a name here; the first is what is run where none is named.

    generate: whether full KV equals the model's own `generate` (equal, differs), compared by the model's first run or
    by `kvlens doctor --model NAME`; not checked: neither compared these files under these versions."""
    from kvlens.models import catalogue
    from kvlens.runs.modelcheck import UNCHECKED, worst_check

    results = catalogue.entries()
    checks = {entry.name: worst_check(entry.name) for entry in results}
    verdicts = {name: UNCHECKED if check is None else check.verdict for name, check in checks.items()}
    if as_json:
        entries = [entry.as_json() | {"generate": verdicts[entry.name]} for entry in results]
        typer.echo(json.dumps(entries, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "family", "shape", "context", "size", "licence", "calibrations", "generate", "what it is"):
        table.add_column(column, no_wrap=column == "name")
    for entry in results:
        cells = (
            entry.name,
            entry.family,
            entry.shape,
            entry.context and f"{entry.context:,}",
            _size(entry.bytes),
            entry.licence,
            ", ".join(entry.calibrations),
            verdicts[entry.name],
            entry.problem or entry.title,
        )
        table.add_row(*(Text(str(cell or "")) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 240).print(table)


@models_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A name, a folder, a .gguf file or a hub id.")], as_json: AsJson = False
) -> None:
    """One model: family, shape, context, licence, source, size, calibrations."""
    from kvlens.models import catalogue
    from kvlens.runs.modelcheck import worst_check

    entry = catalogue.entry(name)
    fields: dict[str, Any] = entry.as_json()
    check = worst_check(name)
    fields["generate"] = None if check is None else check.sentence
    if as_json:
        typer.echo(json.dumps(fields, ensure_ascii=False))
        return
    for key, value in fields.items():
        cell_text = _size(value) if key == "bytes" else ", ".join(value) if isinstance(value, list) else value
        typer.echo(f"{key:13} {'' if cell_text is None else cell_text}")


@models_app.command()
def add(
    place: Annotated[str, typer.Argument(help="A folder, a .gguf file, or a hub id with --hub.")],
    name: Annotated[str | None, typer.Option(help="Its name here; default: the end of the place.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Fetch a hub id's files: the one command that asks it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a model a name. A GGUF file is converted into the cache at once; the file itself stays where it is."""
    from kvlens.cli.progress import Bar
    from kvlens.models import catalogue
    from kvlens.models.find import resolve

    if hub:
        catalogue.fetch(place)
    entry = catalogue.add(name or Path(place).stem, place)
    bar = Bar(Console(stderr=True, soft_wrap=True))
    try:
        resolve(entry.name, bar.report)
    except BaseException:
        catalogue.remove(entry.name)
        raise
    finally:
        bar.end_run("", "")
    if as_json:
        typer.echo(json.dumps(catalogue.entry(entry.name).as_json(), ensure_ascii=False))
    else:
        typer.echo(f"{entry.name}: {entry.family}, {entry.shape}")


@models_app.command()
def remove(name: str) -> None:
    """Forget a name and delete what was converted for it. Your own files stay as they are."""
    from kvlens.models import catalogue

    deleted = catalogue.remove(name)
    typer.echo(f"{name}: removed" + "".join(f"; deleted {folder}" for folder in deleted))


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f} MB"
