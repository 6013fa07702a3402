"""The lab's commands: bench, calibrate, train."""

from __future__ import annotations

import typer

from kvlens.lab.commands.bench import bench_app
from kvlens.lab.commands.calibrate import calibrate_app
from kvlens.lab.commands.claims import claims, rates
from kvlens.lab.commands.explain import explain
from kvlens.lab.commands.freetext import text
from kvlens.lab.commands.train import train_app


def register(app: typer.Typer) -> None:
    """Add the lab's commands to the command line."""
    for command in (claims, rates, explain, text):
        bench_app.command()(command)
    app.add_typer(train_app, name="train")
    app.add_typer(calibrate_app, name="calibrate")
    app.add_typer(bench_app, name="bench")
