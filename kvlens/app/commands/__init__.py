"""The app's commands: app, gallery, report."""

from __future__ import annotations

import typer

from kvlens.app.commands.app import app as dashboard
from kvlens.app.commands.gallery import gallery
from kvlens.app.commands.report import report


def register(app: typer.Typer) -> None:
    """Add the app's commands to the command line."""
    for command in (dashboard, gallery, report):
        app.command()(command)
