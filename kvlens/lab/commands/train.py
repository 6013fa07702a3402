"""`kvlens train`: the embedded demo model, and `kvlens train NAME` for what a method learns (its part `commands`). All
show progress and can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.lab.commands.method_commands import MethodCommands

train_app = typer.Typer(
    help="Train the embedded demo model or a method's own parameters.", no_args_is_help=True, cls=MethodCommands
)


def show(figures: dict[str, Any]) -> None:
    """One JSON line of progress."""
    typer.echo(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))


@train_app.command("demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, log and model; run again to continue.")] = Path(
        "build/demo-model"
    ),
    minutes: Annotated[
        float | None, typer.Option(help="Nominal minutes on two idle cores; scales the number of steps.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew even if there is a checkpoint.")] = False,
) -> None:
    """Make the demo model from scratch: documents, tokenizer, weights."""
    from kvlens.lab.training.demo.schedule import FULL_MINUTES
    from kvlens.lab.training.demo.train import train_demo

    folder = train_demo(out, FULL_MINUTES if minutes is None else minutes, seed, not fresh)
    typer.echo(str(folder))
