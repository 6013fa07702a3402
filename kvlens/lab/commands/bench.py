"""`kvlens bench`: quality at equal budgets, the papers' claims, recorded rates, and what a GPU does. All write JSON
with its provenance."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli.options import DEFAULT_MODEL, Device, Model, RunsDir, runs_folder
from kvlens.cli.study import Batch, RayAddress, Workers
from kvlens.lab.commands.results import PLACE, Out, beside, out_file, results, results_folder, write
from kvlens.models.find import SMOLLM2
from kvlens.workers.lanes import Crew

bench_app = typer.Typer(
    help="Measure the methods; every result carries machine, versions and date.", no_args_is_help=True
)

Methods = Annotated[str, typer.Option(help="Comma-separated; default: all that are installed.")]
Budgets = Annotated[str, typer.Option(help="Shares of full KV, comma-separated.")]
Order = Annotated[
    str, typer.Option(help="in: the question is read and placed with its context; after: fed once that was placed.")
]
Minutes = Annotated[float, typer.Option(help="Stop after this long; run again to continue.")]


Table = Annotated[
    Path | None,
    typer.Option(help="Study file of a published table, in place of the options above: a path, or the name of one."),
]


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _table(
    model: str, methods: str, tasks: str, budgets: str, prompts: int, seed: int, minutes: float, question: str
) -> dict[str, Any]:
    """What the quality table and the sweep are asked alike (bench.tablerequest), from the options as typed."""
    options = {"model": model, "budgets": names(budgets), "prompts": prompts, "first_seed": seed, "minutes": minutes}
    options["question"] = question
    named_lists = {"tasks": names(tasks), "methods": names(methods)}
    return options | {name: names for name, names in named_lists.items() if names}


def table_stem(model: str, table: Path | None) -> str:
    """Return what a result file is named after, besides its kind: the study file of its table, else the model."""
    return model if table is None else table.stem.partition("-")[2] or table.stem


@bench_app.command("quality")
def quality(
    model: Model = DEFAULT_MODEL,
    methods: Methods = "",
    tasks: Annotated[
        str, typer.Option(help="See `kvlens bench tasks`; comma-separated; default: real prose, the toy's own for it.")
    ] = "",
    budgets: Budgets = "5%,10%,20%",
    length: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 2048,
    prompts: Annotated[int, typer.Option(help="Prompts per task.")] = 25,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt.")] = 8_000_000,
    minutes: Minutes = 60.0,
    question: Order = "in",
    table: Table = None,
    workers: Workers = 1,
    ray: RayAddress = None,
    batch: Batch = 1,
    runs: RunsDir = None,
    out: Out = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Run nothing: the table of the whole prompts of its study, as they are.")
    ] = False,
    doc: Annotated[
        Path | None,
        typer.Option(
            help="Also write the page of the docs, of all quality tables beside --out, to this Markdown file."
        ),
    ] = None,
) -> None:
    """Exact match, coverage, attended tokens and bytes of every method on the same generated prompts at the same
    budgets. The table is a study (`kvlens studies list`): run the command again to continue it."""
    from kvlens.lab.bench import quality as bench
    from kvlens.lab.bench.qualitypage import document, markdown
    from kvlens.lab.bench.tablefile import quality_request
    from kvlens.runs.stopping import stop_signals
    from kvlens.text.outfile import check_file

    check_file(doc, "--doc")
    if table is None:
        asked = _table(model, methods, tasks, budgets, prompts, seed, minutes, question)
        request = bench.QualityRequest(**asked, length=length)
    else:
        request = quality_request(table).model_copy(update={"minutes": minutes})
    target, folder = out_file(out, "quality", table_stem(request.model, table)), runs_folder(runs)
    if collect:
        result = bench.collect(request, folder)
    else:
        crew, report = Crew(workers, ray, batch), partial(_tell, figure="exact")
        result = bench.measure(request, folder, report, _tell_line, crew, stop_signals())
    write(target, result)
    if doc is not None:
        doc.write_text(document(beside(target, "quality", result), results(target.parent, "text")), encoding="utf-8")
    typer.echo(markdown(result))


@bench_app.command("sweep")
def sweep(
    model: Model = DEFAULT_MODEL,
    methods: Methods = "",
    tasks: Annotated[
        str,
        typer.Option(
            help="See `kvlens bench tasks`; comma-separated; a file is KIND:PATH; default: one needle in real prose, "
            "in the toy's language for it."
        ),
    ] = "",
    budgets: Budgets = "10%,20%",
    lengths: Annotated[str, typer.Option(help="Tokens of a generated prompt, comma-separated.")] = "512,1024,2048",
    depths: Annotated[str, typer.Option(help="0 (start) to 1 (end), comma-separated.")] = "0.1,0.3,0.5,0.7,0.9",
    prompts: Annotated[int, typer.Option(help="Prompts per task, length and depth; of a file, its first so many.")] = 5,
    cut: Annotated[int | None, typer.Option(help="Cut a file's prompts in their middle to so many tokens.")] = None,
    seed: Annotated[int, typer.Option(help="First seed of the prompts.")] = 9_000_000,
    minutes: Minutes = 60.0,
    question: Order = "in",
    traces: Annotated[bool, typer.Option("--traces/--no-traces", help="Store every trial as a run.")] = True,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    table: Table = None,
    workers: Workers = 1,
    ray: RayAddress = None,
    batch: Batch = 1,
    runs: RunsDir = None,
    out: Out = None,
) -> None:
    """Method x budget x task x length x depth x seed: one row per trial, one stored run per row. The sweep is a study
    (`kvlens studies list`): run the command again to continue it."""
    from kvlens.lab.bench import sweepfile
    from kvlens.lab.bench.sweep import SweepRequest
    from kvlens.lab.bench.sweep import sweep as run
    from kvlens.lab.bench.tablefile import sweep_request
    from kvlens.runs.stopping import stop_signals

    if table is None:
        request = SweepRequest(
            **_table(model, methods, tasks, budgets, prompts, seed, minutes, question),
            lengths=_numbers(lengths, int),
            depths=_numbers(depths, float),
            cut=cut,
            traces=traces,
            device=device,
            dtype=dtype,
        )
    else:
        request = sweep_request(table).model_copy(update={"minutes": minutes})
    target = out_file(out, "grid", table_stem(request.model, table))
    crew, report = Crew(workers, ray, batch), partial(_tell, figure="score")
    about, rows = run(request, runs_folder(runs), report, _tell_line, crew, stop_signals())
    sweepfile.write(target, about, list(rows))
    typer.echo(f"{about['trials']} of {about['planned']} trials in {target}")


def _tell(count: int, total: int, row: dict[str, Any], figure: str) -> None:
    _tell_line(f"{count}/{total} {_trial(row, figure)}")


def _tell_line(line: str) -> None:
    typer.echo(line, err=True)


def _trial(row: dict[str, Any], figure: str) -> str:
    place = (
        ""
        if row["length"] is None
        else f" {row['length']} tokens" + ("" if row["depth"] is None else f" at {row['depth']:.0%}")
    )
    return f"{row['task']}{place} #{row['index']}, {row['method']} {row['budget'] or 'no limit'}: {_came(row, figure)}"


def _came(row: dict[str, Any], figure: str) -> str:
    if figure in row:
        return "not judged" if row[figure] is None else f"{figure} {row[figure]:.2f}"
    return row.get("refused") or f"infeasible, needs {row['infeasible']:.1%}"


def _numbers(text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(name) for name in names(text))
    except ValueError:
        raise ValueError(f"'{text}' is not a list of numbers separated by commas.") from None


@bench_app.command("tasks")
def show_tasks(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False) -> None:
    """The tasks there are, and what scores them. Files of published benchmarks are named KIND:PATH."""
    from kvlens import tasks

    entries = tasks.catalogue()
    if as_json:
        typer.echo(json.dumps({"tasks": entries, "files": list(tasks.file_kinds())}, ensure_ascii=False))
        return
    for entry in entries:
        source = (
            "the demo model's own" if entry["demo_language"] else "for any tokenizer; not in the demo model's language"
        )
        typer.echo(f"{entry['name']:18} {entry['summary']} ({source})\n{'':18} scored by {entry['metric']}")
    typer.echo(f"files: {', '.join(f'{kind}:PATH' for kind in tasks.file_kinds())}")
    for kind, defaults in tasks.parameters().items():
        typer.echo(f"{'':18} {kind}:PATH{''.join(f'@{name}={value}' for name, value in defaults.items())}")
    for sentence in tasks.refused().values():
        typer.echo(sentence, err=True)


@bench_app.command("gpu")
def gpu(
    out: Annotated[
        Path | None, typer.Option(help=f"Folder of the result file, gpu-<device>.json; default: {PLACE}.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="No part is begun after this long; run again to continue.")] = 10.0,
    parts: Annotated[
        str, typer.Option(help="Beginnings of parts' names, by commas, or whole names, by semicolons; default: all.")
    ] = "",
    contexts: Annotated[str, typer.Option(help="Tokens, comma-separated; default: 8192,32768,131072.")] = "",
    batches: Annotated[str, typer.Option(help="Sequences, comma-separated; default: 1,8.")] = "",
    model: Annotated[str, typer.Option(help="Whose KV is offloaded: a name, a GGUF file or a folder.")] = SMOLLM2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tiny shapes on the CPU; the figures mean nothing.")
    ] = False,
) -> None:
    """Ceilings, checks, real offload, kernels and whole decode steps at the shape of an 8B model, on the first CUDA
    device."""
    from kvlens.lab.gpu.run import Request, measure, numbers, part_names

    named, whole = part_names(parts)
    sizes = numbers(contexts), numbers(batches)
    request = Request(out or results_folder(), minutes, named, dry_run, *sizes, model, whole)
    typer.echo(measure(request, lambda line: typer.echo(line, err=True)).name)
