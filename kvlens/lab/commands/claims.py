"""`kvlens bench claims` and `kvlens bench rates`: what the papers say of their methods, and what methods that recall do
per step."""

from __future__ import annotations

import json
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli.options import DEFAULT_MODEL, Device, Model, RunsDir, runs_folder
from kvlens.cli.study import RayAddress, Workers
from kvlens.lab.commands.bench import Minutes, names
from kvlens.lab.commands.results import PLACE, default_file, write
from kvlens.workers.lanes import Crew

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.lab.claims.plan import Plan


def claims(
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all that have claims.")] = "",
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[
        int | None,
        typer.Option(help="Prompts of each task; default: as many as each claim needs, by a calculation of power."),
    ] = None,
    passages: Annotated[
        int | None, typer.Option(help="Passages of each claim about text, 21 at most; default: as --prompts.")
    ] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Judge the figures stored in --out again; run no model.")
    ] = False,
    device: Device = "cpu",
    minutes: Minutes = 60.0,
    workers: Workers = 1,
    ray: RayAddress = None,
    runs: RunsDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write JSON with the figures; claims of other methods in it are kept.")
    ] = None,
    doc: Annotated[
        Path | None,
        typer.Option(help="Also write the page of the docs, of all claims in --out, to this Markdown file."),
    ] = None,
) -> None:
    """Check the papers' qualitative claims on a model at hand, and say of each whether it holds there. Comparisons are
    a study (`kvlens studies list`): run the command again to continue it."""
    from kvlens.lab.claims.page import document
    from kvlens.lab.claims.plan import PASSAGES
    from kvlens.text.outfile import check_file

    if prompts is not None and prompts < 1:
        raise ValueError("--prompts must be at least 1.")
    if passages is not None and not 1 <= passages <= PASSAGES:
        raise ValueError(f"--passages must be at least 1 and at most {PASSAGES}.")
    check_file(out, "--out")
    check_file(doc, "--doc")
    if out is None and (judge or doc is not None):
        raise ValueError(f"{'--judge' if judge else '--doc'} is made of a result file: name it with --out.")
    parts = json.loads(out.read_text(encoding="utf-8"))["methods"] if out is not None and out.exists() else {}
    if rest := {part["about"]["model"] for part in parts.values()} - {model}:
        raise ValueError(f"'{out}' holds claims checked on {min(rest)}: name another file for {model}.")
    if judge:
        assert out is not None
        _judge_stored(parts, out)
    else:
        plans = _plans(list(names(methods)), model, prompts, passages)
        crew = Crew(workers, ray)
        _measure(parts, plans, model, device, prompts, minutes, crew, runs_folder(runs), out)
    if doc is not None:
        doc.write_text(document({"methods": parts}, model), encoding="utf-8")
    sys.stdout.flush()


def _judge_stored(parts: dict[str, Any], out: Path) -> None:
    """Judge stored claims again, print those whose verdict changed, and write them. parts: changed in place."""
    from kvlens.lab.claims.page import VERDICTS
    from kvlens.lab.claims.stored_claims import judge_again

    again, count = judge_again({"methods": parts})["methods"], 0
    for name, part in again.items():
        for previous, claim in zip(parts[name]["claims"], part["claims"], strict=True):
            if previous["holds"] is not claim["holds"]:
                count += 1
                verdicts = f"{VERDICTS[previous['holds']]} -> {VERDICTS[claim['holds']]}"
                typer.echo(f"[{verdicts}] {claim['source']}: {claim['says']}")
    parts.update(again)
    write(out, {"methods": parts})
    typer.echo(f"{count} of {sum(len(part['claims']) for part in again.values())} claims changed their verdict.")


def _plans(choice: list[str], model: str, prompts: int | None, passages: int | None) -> dict[str, list[Plan]]:
    """Return the plan of each method's statements, and print it."""
    from kvlens import methods
    from kvlens.lab.claims.check import claiming, planned
    from kvlens.lab.claims.plan import plan_lines

    plans = planned(choice or claiming(model), model, prompts, passages)
    titles = {name: method.title for name, method in methods.registry().items()}
    for line in plan_lines(plans, titles):
        _tell(line)
    return plans


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _measure(
    parts: dict[str, Any],
    plans: dict[str, list[Plan]],
    model: str,
    device: str,
    prompts: int | None,
    minutes: float,
    crew: Crew,
    runs: Path,
    out: Path | None,
) -> None:
    """Carry out the study of the statements, judge the claims and print them. parts: gets the claims of each method."""
    import torch

    from kvlens import __version__
    from kvlens.lab.claims import written
    from kvlens.lab.claims.armstudy import measure_arms
    from kvlens.lab.claims.check import check
    from kvlens.lab.claims.page import verdict_words
    from kvlens.lab.claims.plan import FEWEST
    from kvlens.models.device import machine
    from kvlens.runs.stopping import stop_signals

    torch.set_num_threads(1)
    count = FEWEST if prompts is None else prompts
    statements = [(row.statement, row.prompts) for rows in plans.values() for row in rows]
    trials = measure_arms(statements, model, device, minutes, runs, _tell, crew, stop_signals())
    about = {
        "kvlens": __version__,
        "torch": torch.__version__,
        "machine": machine(),
        "model": model,
        "prompts": count,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    for name, results in check(model, plans, trials, partial(_engine, model, device), count, _tell):
        claims_written = [written(claim) for claim in results]
        for claim in claims_written:
            typer.echo(
                f"[{verdict_words(claim)}] {claim['source']}: {claim['says']}\n    {claim['measured']}"
                + (f"\n    {claim['reason']}" if claim["reason"] else "")
            )
        parts[name] = {"about": about, "claims": claims_written}
        if out is not None:
            write(out, {"methods": parts})


@cache
def _engine(model: str, device: str) -> Engine:
    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load
    from kvlens.models.device import settle

    return Engine(load(model, settle(device)))


def rates(
    model: Model = DEFAULT_MODEL,
    tasks: Annotated[
        str, typer.Option(help="See `kvlens bench tasks`; comma-separated; default: those with long answers.")
    ] = "",
    budget: Annotated[str, typer.Option(help="A share of full KV.")] = "20%",
    length: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 2048,
    prompts: Annotated[int, typer.Option(help="Prompts per task.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt.")] = 6_600_000,
    out: Annotated[Path | None, typer.Option(help=f"JSON file to write; default: rates.json, {PLACE}.")] = None,
) -> None:
    """Misses, corrections, zooms and reuse of the methods that recall, read from recorded steps; `kvlens bench gpu`
    replays them."""
    from kvlens.lab.bench.rates import RatesRequest, measure
    from kvlens.text.outfile import check_file

    check_file(out, "--out")
    target = out or default_file("rates.json")
    mapping: dict[str, Any] = {"tasks": names(tasks)} if names(tasks) else {}
    request = RatesRequest(model=model, budget=budget, length=length, prompts=prompts, first_seed=seed, **mapping)
    result = measure(request, lambda line: typer.echo(line, err=True))
    write(target, result)
    for name, line in result["methods"].items():
        sentence = ", ".join(
            f"{rate} {results['mean']:.3f} ({results['p10']:.3f} to {results['p90']:.3f})"
            for rate, results in line["rates"].items()
        )
        typer.echo(f"{name}: {sentence}; {line['steps']} steps")
