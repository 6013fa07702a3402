"""`kvlens study`: prompts under methods, values of parameters and budgets; `kvlens studies`: the stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli.options import (
    DEFAULT_MODEL,
    AsJson,
    Device,
    Model,
    ProgressJson,
    RunsDir,
    err,
    fail,
    runs_folder,
    show_table,
    writable,
)
from kvlens.runs.request import DEFAULT_SHARE
from kvlens.text.plaintext import json_text, terminal

if TYPE_CHECKING:
    from pandas import DataFrame

    from kvlens.studies.plan import Arm
    from kvlens.studies.promptrow import StudyPrompt
    from kvlens.studies.storage import Trial
    from kvlens.studies.table import Results

studies_app = typer.Typer(help="List, show, compare, continue and extend studies.", no_args_is_help=True)
_SHOWN = ("right", "same_output", "kl_nats", "resident_share", "read_share", "corrected_share")
"""figures that a terminal has room for"""


class Lines:
    """Prints a line for every trial that ends; `as_json`: JSON objects on stdout, for programs."""

    def __init__(self, as_json: bool) -> None:
        from kvlens.cli.progress import JsonLines

        self._json = JsonLines() if as_json else None

    def report(self, phase: str, number: int, total: int) -> None:
        """Pass on to programs that the model is being loaded; of a trial's own phases nothing is said."""
        if self._json is not None and phase in ("convert", "load"):
            self._json.report(phase, number, total)

    def trial(self, finished: int, total: int, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        """See kvlens.studies.running.Audience."""
        if self._json is not None:
            fields = {"phase": "trial", "done": finished, "total": total, **vars(trial)}
            typer.echo(json_text(fields))
            return
        words = trial.message or (trial.figures or {}).get("outcome") or trial.state
        name = " ".join(filter(None, (arm.method, *(f"{k}={v}" for k, v in arm.overrides.items()), arm.budget)))
        err.print(terminal(f"{finished}/{total} {prompt.id} {name}: {words}"), markup=False, highlight=False)


def study(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="Files of prompts (.jsonl, .jsonl.gz, .csv, .json, .txt), KIND:PATH of a benchmark, or generated "
            "tasks, for example niah_single@length=1024@prompts=20."
        ),
    ],
    methods: Annotated[str, typer.Option(help="Names with commas between them; full KV runs beside them always.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="method.parameter=value,value,...; may be repeated.")
    ] = None,
    preset: Annotated[list[str] | None, typer.Option(help="method:preset; may be repeated.")] = None,
    budgets: Annotated[str, typer.Option(help="Shares of full KV, tokens or bytes, with commas.")] = DEFAULT_SHARE,
    questions: Annotated[str, typer.Option(help="in, after or in,after, as for `run --question`.")] = "in",
    seeds: Annotated[str, typer.Option(help="Numbers with commas.")] = "0",
    name: Annotated[str, typer.Option(help="A name for the study.")] = "",
    model: Model = DEFAULT_MODEL,
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    chat: Annotated[str, typer.Option(help="auto, on or off, as for `run`.")] = "auto",
    system: Annotated[str | None, typer.Option(help="The chat form's system message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    trace_level: Annotated[str, typer.Option(help="summary, heads or spans, as for `run`.")] = "spans",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Say what would be run and what it could decide; run nothing.")
    ] = False,
    runs: RunsDir = None,
    as_json: AsJson = False,
    progress_json: ProgressJson = False,
) -> None:
    """Run prompts under methods, values of their parameters and budgets. Every trial is a stored run. The last line is
    the study's id: `kvlens studies show ID` prints its results, `kvlens studies resume ID` goes on after a stop."""
    from kvlens.runs.races import entrants
    from kvlens.runs.request import RunRequest
    from kvlens.studies import storage
    from kvlens.studies.plan import StudyPlan, parse_values
    from kvlens.studies.promptfile import read_prompts
    from kvlens.tasks.encoding import encoding

    names = _parts(methods)
    shared = RunRequest(
        model=model,
        max_new=max_new,
        chat=chat,
        system=system,
        temperature=temperature,
        trace_level=trace_level,
        device=device,
        dtype=dtype,
    )
    plan = StudyPlan(
        name=name,
        shared=shared,
        entrants=entrants(methods, preset or [], []),
        values=parse_values(set_ or [], names),
        budgets=_parts(budgets),
        questions=_parts(questions),
        seeds=tuple(_number(text) for text in _parts(seeds)),
    )
    plan.check()
    read = read_prompts(prompts, partial(encoding, model, chat, system))
    for sentence in read.faults:
        err.print(f"kvlens: left out: {terminal(sentence)}", markup=False, highlight=False)
    if plan_only:
        typer.echo(_plan_text(len(read.prompts), plan.arms()))
        return
    info = storage.create(runs_folder(runs), plan, read.prompts)
    _carry_out(runs_folder(runs), info.id, progress_json, as_json)


@studies_app.command("list")
def studies_list(runs: RunsDir = None, as_json: AsJson = False) -> None:
    """Print the stored studies, newest first."""
    from kvlens.studies.catalogue import studies_in

    rows = studies_in(runs_folder(runs))
    if as_json:
        typer.echo(json_text([vars(row) for row in rows]))
        return
    shown = [[row.id, row.name, row.model, row.methods, row.prompts, f"{row.ended}/{row.planned}"] for row in rows]
    show_table(["uid", "name", "model", "methods", "prompts", "trials"], shown)


@studies_app.command("show")
def studies_show(
    study_id: str,
    curve: Annotated[str | None, typer.Option(help="A figure along this axis: budget, or a parameter.")] = None,
    figure: Annotated[str, typer.Option(help="The figure of --curve: right, kl_nats, resident_share, ...")] = "right",
    group: Annotated[str | None, typer.Option(help="Only the prompts of this group.")] = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Print a study's matrix: one line per arm, with n and 95 % intervals; or a curve."""
    results = _read(runs, study_id)
    frame = results.matrix(group) if curve is None else results.curve(curve, figure)
    if as_json:
        typer.echo(frame.to_json(orient="records", double_precision=15))
        return
    if curve is None:
        typer.echo(f"{results.ended} of {results.planned} trials, {len(results.prompts)} prompts")
        show_table(["arm", "n", *_SHOWN, "refused", "failed"], [_matrix_row(row) for row in rows_of(frame)])
        return
    rows = [
        [row["line"], f"{row['x']:g}", row["n"], *_interval(row["value"], row["low"], row["high"])]
        for row in rows_of(frame)
    ]
    show_table(["line", curve, "n", figure, "95 % interval"], rows)


@studies_app.command("compare")
def studies_compare(study_id: str, a: str, b: str, runs: RunsDir = None, as_json: AsJson = False) -> None:
    """Compare two arms, named as `show` names them, on the prompts of both: which prompts only one answers right, the
    difference with its interval, McNemar's exact test, and how many prompts would decide."""
    from kvlens.studies.paired import compare, sentence_of

    paired = compare(_read(runs, study_id), a, b)
    if as_json:
        splits = [vars(split) for split in paired.splits]
        typer.echo(json_text({**vars(paired), "splits": splits, "difference": paired.difference}))
        return
    typer.echo(sentence_of(paired, a, b))
    if paired.splits:
        rows = [[split.prompt, a if split.right == "a" else b, split.uid_a, split.uid_b] for split in paired.splits]
        show_table(["prompt", "right under", f"run of {a}", f"run of {b}"], rows)


@studies_app.command("export")
def studies_export(
    study_id: str,
    to: Annotated[Path | None, typer.Option("--out", help="A .csv or .parquet file; default: CSV on stdout.")] = None,
    runs: RunsDir = None,
) -> None:
    """Write one row per trial with its whole configuration and figures."""
    from kvlens.store.export import csv_bytes

    writable(to)
    frame = _read(runs, study_id).frame()
    if to is None:
        typer.echo(csv_bytes(frame).decode(), nl=False)
    elif to.suffix == ".parquet":
        frame.to_parquet(to, index=False)
    else:
        to.write_bytes(csv_bytes(frame))


@studies_app.command("resume")
def studies_resume(
    study_id: str, runs: RunsDir = None, as_json: AsJson = False, progress_json: ProgressJson = False
) -> None:
    """Run the trials of a study that have not ended."""
    _carry_out(runs_folder(runs), study_id, progress_json, as_json)


def _carry_out(folder: Path, study_id: str, progress_json: bool, as_json: bool) -> None:
    from kvlens.cli.progress import reserve_stdout
    from kvlens.runs.stopping import stop_signals
    from kvlens.studies.running import carry_out

    cancelled = stop_signals()
    lines = Lines(progress_json)
    if progress_json:
        typer.echo(json_text({"phase": "study", "study": study_id}))
    with reserve_stdout(progress_json or as_json):
        whole = carry_out(folder, study_id, lines, cancelled)
    if progress_json:
        typer.echo(json_text({"phase": "done", "study": study_id, "status": "completed" if whole else "stopped"}))
    elif as_json:
        typer.echo(json_text({"study": study_id, "whole": whole}))
    else:
        typer.echo(study_id)
    if not whole:
        fail(f"the study is not whole: go on with `kvlens studies resume {study_id}`.")


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, column -> value."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _plan_text(prompts: int, arms: Sequence[Arm]) -> str:
    from kvlens.studies.paired import POWER, detectable

    smallest = detectable(prompts)
    words = "no difference of shares" if smallest is None else f"a difference of {smallest:.0%} or more"
    return (
        f"{prompts} prompts x {len(arms)} arms = {prompts * len(arms)} trials. "
        f"{prompts} prompts show {words} between two arms with a chance of {POWER:.0%}, if only the better one is "
        "right where they differ."
    )


def _read(runs: Path | None, study_id: str) -> Results:
    from kvlens.studies.table import Results

    return Results.read(runs_folder(runs), study_id)


def _matrix_row(row: dict[str, Any]) -> list[Any]:
    cells = [_text(row.get(name)) for name in _SHOWN]
    if row["n"]:
        cells[0] = " ".join(_interval(row["right"], row["right_low"], row["right_high"]))
    return [row["label"], row["n"], *cells, row["refused"] or "", row["failed"] or ""]


def _interval(value: float, low: float, high: float) -> list[str]:
    return [_text(value), "" if low != low else f"({_text(low)} to {_text(high)})"]


def _text(value: Any) -> str:
    return "" if value is None or value != value else f"{value:.3g}"


def _parts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--seeds takes whole numbers, not '{text}'.") from None
