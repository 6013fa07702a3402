"""`kvlens gate`: a study from a TOML file, judged by thresholds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli.options import AsJson, RunsDir, err, fail, runs_folder, show_table
from kvlens.cli.study import Batch, Lines, RayAddress, Workers
from kvlens.files import naming
from kvlens.text.plaintext import json_text, terminal
from kvlens.workers.lanes import Crew

if TYPE_CHECKING:
    from kvlens.studies.checks import Check
    from kvlens.studies.planfile import PlanFile
    from kvlens.studies.promptfile import ReadPrompts
    from kvlens.studies.storage import StudyInfo

MISSED = 3
"""exit status where a threshold is not kept; 1: the study could not be carried out"""


def gate(
    plan_file: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study and its thresholds.")],
    junit: Annotated[Path | None, typer.Option(help="JUnit XML to write; default: beside the file.")] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Begin another study where one is stored.")] = False,
    workers: Workers = 1,
    ray: RayAddress = None,
    batch: Batch = 1,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Run a study, or go on with it, and judge every arm by the thresholds of the file. Exit status 0: all are kept;
    3: some are not; 1: the study could not be carried out."""
    from kvlens.cli.progress import reserve_stdout
    from kvlens.runs.stopping import stop_signals
    from kvlens.studies.checks import checks
    from kvlens.studies.junit import junit as xml
    from kvlens.studies.models import check_loading
    from kvlens.studies.planfile import read_plan
    from kvlens.studies.promptfile import read_prompts
    from kvlens.studies.table import Results
    from kvlens.tasks.encoding import counting
    from kvlens.text.outfile import check_file

    crew, folder, request = Crew(workers, ray, batch), runs_folder(runs), read_plan(plan_file)
    target = junit or plan_file.with_suffix(".xml")
    check_file(target, "--junit")
    shared = request.plan.shared
    counted = counting(shared.model, shared.chat, shared.system, shared.chat_args)
    read = read_prompts(request.prompts, counted, request.segments)
    for sentence in read.faults:
        err.print(f"kvlens: left out: {terminal(sentence)}", markup=False, highlight=False)
    check_loading(request.plan)
    cancelled = stop_signals()
    with reserve_stdout(as_json):
        info = _carry_out(folder, request, read, anew, crew, cancelled)
    if cancelled():
        fail("stopped; what has ended is stored: run the same command to go on.")
    results = Results.read(folder, info.id)
    rows = checks(results, request.thresholds)
    properties = {
        "study": info.id,
        "model": shared.model,
        "fingerprint": results.info.fingerprint or "",
        "kvlens": info.kvlens,
        "prompts": len(results.prompts),
        "left_out": len(read.faults),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    with naming(target):
        target.write_bytes(xml(request.plan.name or plan_file.stem, rows, properties))
    missed = [row for row in rows if not row.passed]
    if as_json:
        states = [{**vars(row), "passed": row.passed} for row in rows]
        typer.echo(json_text({"study": info.id, "junit": str(target), "passed": not missed, "checks": states}))
    else:
        show_table(["arm", "threshold", "outcome", "measured"], [_row(row) for row in rows])
        typer.echo(f"{len(rows) - len(missed)} of {len(rows)} checks passed; study {info.id}; {target}")
    if missed:
        raise typer.Exit(MISSED)


def _carry_out(folder: Path, request: PlanFile, read: ReadPrompts, anew: bool, crew: Crew, cancelled: Any) -> StudyInfo:
    """Run what is missing. A study whose model has changed since is left, and another one begun."""
    from kvlens.studies.gate import gate_study
    from kvlens.studies.running import carry_out

    info = gate_study(folder, request.plan, read.prompts, request.thresholds, anew)
    try:
        carry_out(folder, info.id, Lines(request.plan), cancelled, crew=crew)
    except ValueError as error:
        if getattr(error, "code", None) != "model_changed" or anew:
            raise
        info = gate_study(folder, request.plan, read.prompts, request.thresholds, anew=True)
        carry_out(folder, info.id, Lines(request.plan), cancelled, crew=crew)
    return info


def _row(check: Check) -> list[str]:
    return [check.arm, check.threshold, check.state.replace("_", " "), check.sentence]
