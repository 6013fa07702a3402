"""`kvlens gallery`: the recorded losses that come with kvlens."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlens.cli.options import AsJson, RunsDir, runs_folder, show_table
from kvlens.text.plaintext import terminal


def gallery(
    method: Annotated[str | None, typer.Argument(help="Put this method's loss among the runs.")] = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Recorded losses of a real model under some methods, one each: list them, or put one among the runs, with the run
    in which what was missed was held. The last line of stdout is then the uid of the one that lost."""
    from kvlens.app import gallery as shelf

    losses = shelf.losses()
    if method is not None:
        choice = next((loss for loss in losses if loss.method == method), None)
        if choice is None:
            raise ValueError(
                f"the gallery has no loss of '{method}'; it has {', '.join(loss.method for loss in losses)}."
            )
        uid = shelf.bring(choice, runs_folder(runs))
        typer.echo(terminal(choice.verdict))
        typer.echo(terminal(choice.held.sentence(choice.full_kv_bytes)))
        typer.echo(uid)
        return
    if as_json:
        typer.echo(shelf.index().model_dump_json())
        return
    rows = [[loss.method, loss.question, loss.expected, loss.came, loss.cause, loss.held.restored] for loss in losses]
    show_table(["method", "question", "expected", "came", "why", "held: restored"], rows)
