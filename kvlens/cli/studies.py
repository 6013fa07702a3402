"""`kvlens studies`: list, show, compare, export and continue stored studies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli.options import AsJson, ProgressJson, RunsDir, err, runs_folder, show_table, writable
from kvlens.cli.study import MOST_AT_ONCE, RayAddress, Workers, carry_out_stored, number_of, parts_of
from kvlens.files import naming
from kvlens.text.plaintext import json_text, terminal
from kvlens.workers.lanes import resuming_crew

if TYPE_CHECKING:
    from pandas import DataFrame

    from kvlens.studies.table import Results

studies_app = typer.Typer(help="List, show, compare, continue and extend studies.", no_args_is_help=True)
StudyBatch = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_AT_ONCE, help="Prompts whose decode steps are computed together; default: as before."),
]
_SHOWN = ("right", "same_output", "kl_mean_nats", "compared_steps", "resident_share", "read_share", "corrected_share")
"""figures that a terminal has room for"""


@studies_app.command("list")
def studies_list(runs: RunsDir = None, as_json: AsJson = False) -> None:
    """Print the stored studies, newest first."""
    from kvlens.runs.folder import listed_folder
    from kvlens.studies.catalogue import studies_in

    rows = studies_in(listed_folder(runs))
    if as_json:
        typer.echo(json_text([vars(row) for row in rows]))
        return
    shown = [[row.id, row.name, row.model, row.methods, row.prompts, f"{row.ended}/{row.planned}"] for row in rows]
    show_table(["uid", "name", "model", "methods", "prompts", "trials"], shown)


@studies_app.command("show")
def studies_show(
    study_id: str,
    curve: Annotated[str | None, typer.Option(help="A figure along this axis: budget, or a parameter.")] = None,
    figure: Annotated[
        str, typer.Option(help="The figure of --curve: right, kl_mean_nats, resident_share, ...")
    ] = "right",
    group: Annotated[str | None, typer.Option(help="Only the prompts of this group.")] = None,
    paper: Annotated[str | None, typer.Option(help="The settings of this arm beside its paper's.")] = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Print a study's matrix: one line per arm, with n and 95 % intervals; or a curve; or why an arm's score is not its
    paper's."""
    results = _read(runs, study_id)
    if paper is not None:
        from kvlens.studies.papers import beside_paper

        settings = beside_paper(results, paper, runs_folder(runs))
        if as_json:
            typer.echo(json_text([vars(row) for row in settings]))
            return
        cells = [[row.setting, row.study, row.paper, row.state] for row in settings]
        show_table(["setting", "this study", "paper", "state"], cells)
        return
    frame = results.matrix(group) if curve is None else results.curve(curve, figure)
    if as_json:
        typer.echo(frame.to_json(orient="records", double_precision=15))
        return
    if curve is None:
        typer.echo(f"{results.ended} of {results.planned} trials, {len(results.prompts)} prompts")
        show_table(["arm", "preset", "n", *_SHOWN, "refused", "failed"], [_matrix_row(row) for row in rows_of(frame)])
        _say_cut_off(sum(round(row["cut_off"] * row["n"]) for row in rows_of(frame) if row["cut_off"] > 0))
        return
    rows = [
        [row["line"], f"{row['x']:g}", row["ran_preset"], row["n"], *_interval(row["value"], row["low"], row["high"])]
        for row in rows_of(frame)
    ]
    show_table(["line", curve, "preset", "n", figure, "95 % interval"], rows)


@studies_app.command("compare")
def studies_compare(study_id: str, a: str, b: str, runs: RunsDir = None, as_json: AsJson = False) -> None:
    """Compare two arms, named as `show` names them, on the prompts of both: which prompts only one answers right, the
    difference with its interval, whether McNemar's exact test decides, and how many prompts would decide."""
    from kvlens.studies.paired import compare, sentence_of

    paired = compare(_read(runs, study_id), a, b)
    if as_json:
        splits = [vars(split) for split in paired.splits]
        typer.echo(
            json_text({**vars(paired), "splits": splits, "difference": paired.difference, "decided": paired.decided})
        )
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
    from kvlens.text.outfile import format_of

    fmt = format_of(to, None, ("csv", "parquet"))
    writable(to)
    frame = _read(runs, study_id).frame()
    if to is None:
        typer.echo(csv_bytes(frame).decode(), nl=False)
        return
    with naming(to):
        if fmt == "parquet":
            frame.to_parquet(to, index=False)
        else:
            to.write_bytes(csv_bytes(frame))


@studies_app.command("resume")
def studies_resume(
    study_id: str,
    workers: Workers = 1,
    ray: RayAddress = None,
    batch: StudyBatch = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
    progress_json: ProgressJson = False,
) -> None:
    """Run the trials of a study that have not ended."""
    carry_out_stored(runs_folder(runs), study_id, progress_json, as_json, resuming_crew(workers, ray, batch))


@studies_app.command("extend")
def studies_extend(
    study_id: str,
    prompts: Annotated[list[str] | None, typer.Argument(help="More prompts, as for `kvlens study`.")] = None,
    methods: Annotated[str, typer.Option(help="More methods, with commas.")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="method.parameter=value,...: more values.")] = None,
    budgets: Annotated[str, typer.Option(help="More budgets, with commas.")] = "",
    questions: Annotated[str, typer.Option(help="in, after or in,after.")] = "",
    seeds: Annotated[str, typer.Option(help="More seeds, with commas.")] = "",
    workers: Workers = 1,
    ray: RayAddress = None,
    batch: StudyBatch = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
    progress_json: ProgressJson = False,
) -> None:
    """Add prompts and arms to a study, and run them. What was run stays."""
    from kvlens.runs.entrants import entrants
    from kvlens.studies import storage
    from kvlens.studies.extension import extend
    from kvlens.studies.plan import StudyPlan, parse_values
    from kvlens.studies.promptfile import read_prompts
    from kvlens.tasks.encoding import counting

    crew, folder = resuming_crew(workers, ray, batch), runs_folder(runs)
    plan = storage.read(folder, study_id).plan
    shared, own_methods = plan.shared, {entrant.method for entrant in plan.entrants}
    more = [name for name in parts_of(methods) if name not in own_methods]
    added = StudyPlan(
        shared=shared,
        entrants=entrants(",".join(more), [], []),
        values=parse_values(set_ or [], [*own_methods, *more]),
        budgets=parts_of(budgets),
        questions=parts_of(questions),
        seeds=tuple(number_of(text) for text in parts_of(seeds)),
    )
    counted = counting(shared.model, shared.chat, shared.system, shared.chat_args)
    read = read_prompts(prompts, counted) if prompts else None
    for sentence in () if read is None else read.faults:
        err.print(f"kvlens: left out: {terminal(sentence)}", markup=False, highlight=False)
    extend(folder, study_id, added, () if read is None else read.prompts)
    carry_out_stored(folder, study_id, progress_json, as_json, crew)


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, column -> value."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _read(runs: Path | None, study_id: str) -> Results:
    from kvlens.studies.table import Results

    return Results.read(runs_folder(runs), study_id)


def _say_cut_off(answers: int) -> None:
    if answers:
        counted = "1 wrong answer was" if answers == 1 else f"{answers} wrong answers were"
        typer.echo(f"{counted} cut off by the limit of new tokens; a larger --max-new may complete them.")


def _matrix_row(row: dict[str, Any]) -> list[Any]:
    cells = [_text(row.get(name)) for name in _SHOWN]
    if row["n"]:
        cells[0] = " ".join(_interval(row["right"], row["right_low"], row["right_high"]))
    return [row["label"], row["ran_preset"], row["n"], *cells, row["refused"] or "", row["failed"] or ""]


def _interval(value: float, low: float, high: float) -> list[str]:
    return [_text(value), "" if low != low else f"({_text(low)} to {_text(high)})"]


def _text(value: Any) -> str:
    return "" if value is None or value != value else f"{value:.3g}"
