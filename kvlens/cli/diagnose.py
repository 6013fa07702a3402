"""`kvlens diagnose`: why the stored runs lost, grouped by cause, and what brings their answers back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli.options import AsJson, RunsDir, err, runs_folder, show_table
from kvlens.text.plaintext import strict_json

if TYPE_CHECKING:
    from kvlens.lens.diagnosis import Cause, Diagnosis
    from kvlens.lens.remedies import Remedy

HEADS = 4
"""(layer, KV head) pairs that a line names, the most frequent"""


def diagnose(
    method: Annotated[str | None, typer.Option(help="Of this method's runs alone.")] = None,
    model: Annotated[str | None, typer.Option(help="Of this model's runs alone, as the list of runs names it.")] = None,
    budget: Annotated[str | None, typer.Option(help="Of runs at this budget alone, such as 20%.")] = None,
    task: Annotated[str | None, typer.Option(help="Of this task's prompts alone.")] = None,
    try_: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="Run all that lost again with budget=SHARE, preset=NAME or parameter=value; may be repeated, the "
            "smallest change first.",
        ),
    ] = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Why stored runs lost against full KV, grouped by model, method, budget and cause, with the heads that missed most
    and a run to open; with --try, how many answers each change brings back."""
    from kvlens import methods
    from kvlens.cli.progress import Bar
    from kvlens.lens.diagnosis import Wanted
    from kvlens.lens.diagnosis import diagnose as look
    from kvlens.lens.remedies import Change, attempt
    from kvlens.runs.stopping import stop_signals

    changes = [Change.parse(text) for text in try_ or ()]
    folder, cancelled = runs_folder(runs), stop_signals()
    diagnosis = look(folder, Wanted(method, model, budget, task))
    if not diagnosis.compared:  # a name that is none is said, not counted
        if method is not None:
            methods.get(method)
        _check_stored(folder, model=model, task=task)
    if changes and len({loss.method for loss in diagnosis.lost}) > 1:
        raise ValueError("a change is one method's: add --method NAME.")
    remedies: list[Remedy] = []
    for change in changes if diagnosis.lost else ():
        bar = Bar(err)
        try:
            remedies.append(attempt(folder, diagnosis.lost, change, bar.report, cancelled))
        except BaseException as error:
            bar.failed(error)
            raise
        bar.end_run("", "completed")
        if remedies[-1].most:
            break  # the smallest that helps most of them
    if as_json:
        typer.echo(strict_json(_plain(diagnosis, remedies)))
        return
    _say(diagnosis, remedies, changes, folder)


def _check_stored(folder: Path, **named: str | None) -> None:
    """Raises ValueError with one sentence for a name that no stored run has."""
    from kvlens.store.reader import list_runs

    table = list_runs(folder)
    for column, name in named.items():
        stored_names = sorted({str(value) for value in table[column].dropna()})
        if name is not None and stored_names and name not in stored_names:
            raise ValueError(f"no stored run has {column} '{name}'; those here have {', '.join(stored_names)}.")


def _say(diagnosis: Diagnosis, remedies: list[Remedy], changes: list[Any], folder: Path) -> None:
    from kvlens.text.units import counted

    for sentence in diagnosis.unread:
        typer.echo(sentence, err=True)
    typer.echo(
        f"{counted(diagnosis.compared, 'run')} compared with full KV, {len(diagnosis.lost)} lost"
        + (f"; {diagnosis.mild} more diverged at no cost that is known" if diagnosis.mild else "")
        + "."
    )
    if diagnosis.causes:
        columns = ["model", "method", "held to", "runs", "cause", "missed most by", "of the answer", "for example"]
        show_table(columns, [_row(cause) for cause in diagnosis.causes])
    for remedy in remedies:
        refused = [attempt.refused for attempt in remedy.tried if attempt.refused]
        typer.echo(
            f"{remedy.change}: {remedy.restored} of {len(remedy.tried)} restored"
            + (f"; {len(refused)} refused: {refused[0]}" if refused else ".")
        )
    if remedies and remedies[-1].most and len(remedies) < len(changes):
        typer.echo("More than half came back: the changes after it were not tried.")


def _row(cause: Cause) -> list[Any]:
    from kvlens.lens.reasonkinds import cause as cause_words
    from kvlens.methods.naming import titled

    heads = ", ".join(f"L{layer} KV{head} ({n})" for (layer, head), n in cause.heads[:HEADS])
    more = len(cause.heads) - HEADS
    holding, answered = cause.of_the_answer
    return [
        cause.model,
        titled(cause.method, cause.stand_in),
        cause.limit,
        len(cause.lost),
        cause_words(cause.kind, cause.lost[0].says),
        heads + (f" and {more} more" if more > 0 else ""),
        f"{holding} of {answered}" if answered else "",
        cause.lost[0].uid,
    ]


def _plain(diagnosis: Diagnosis, remedies: list[Remedy]) -> dict[str, Any]:
    return {
        "compared": diagnosis.compared,
        "mild": diagnosis.mild,
        "unread": list(diagnosis.unread),
        "lost": [dataclasses.asdict(loss) for loss in diagnosis.lost],
        "remedies": [
            {
                "change": str(remedy.change),
                "restored": remedy.restored,
                "of": len(remedy.tried),
                "tried": [
                    {
                        "lost": attempt.lost.uid,
                        "run": attempt.uid,
                        "restored": attempt.restored,
                        "refused": attempt.refused,
                    }
                    for attempt in remedy.tried
                ],
            }
            for remedy in remedies
        ],
    }
