"""`kvlens tip`: the budget, or the value of a parameter, at which a stored run's answer tips."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlens.cli.options import AsJson, ProgressJson, RunsDir, err, runs_folder
from kvlens.lens.tipping import MOST
from kvlens.text.plaintext import json_text


def tip(
    uid: str,
    parameter: Annotated[
        str | None, typer.Option(help="A parameter of the method with numbers; default: the budget.")
    ] = None,
    low: Annotated[float | None, typer.Option("--from", help="Lower end: percent of full KV, or a value.")] = None,
    high: Annotated[float | None, typer.Option("--to", help="Upper end.")] = None,
    resolution: Annotated[float | None, typer.Option(min=1e-9, help="Distance that is near enough.")] = None,
    most: Annotated[int, typer.Option(min=2, help="Values to try at most.")] = MOST,
    runs: RunsDir = None,
    as_json: AsJson = False,
    progress_json: ProgressJson = False,
) -> None:
    """Repeat a stored run at other budgets, or with other values of a parameter, until a lost and a right value are
    neighbours. Every repeat is a stored run. The last line says where the answer tips."""
    from kvlens.cli.progress import Bar, JsonLines, reserve_stdout
    from kvlens.lens.tips import tips
    from kvlens.runs.stopping import stop_signals

    reporter: Bar | JsonLines = JsonLines() if progress_json else Bar(err)
    cancelled = stop_signals()
    try:
        with reserve_stdout(progress_json or as_json):
            result = tips(
                runs_folder(runs),
                uid,
                reporter.report,
                cancelled,
                reporter.say,
                parameter=parameter,
                low=low,
                high=high,
                resolution=resolution,
                most=most,
            )
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.end_run((result.right or result.lost or result.probes[0]).uid, "completed")
    if as_json:
        probes = [vars(probe) for probe in result.probes]
        typer.echo(
            json_text({"axis": result.axis, "state": result.state, "sentence": result.sentence, "probes": probes})
        )
    elif not progress_json:
        for probe in result.probes:
            typer.echo(f"{result.words(probe.value):>12}  {'right' if probe.right else 'lost':5}  {probe.uid}")
        typer.echo(result.sentence)
