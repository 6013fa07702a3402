"""`kvlens bench claims` and `kvlens bench rates`: what the papers say of their methods, and what methods that recall do
per step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli.options import DEFAULT_MODEL, Model
from kvlens.lab.commands.bench import names
from kvlens.lab.commands.results import PLACE, Kept, default_file, kept_file, write


def claims(
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all that have claims.")] = "",
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[int, typer.Option(help="Prompts per point; with fewer than 10 nothing is decided.")] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Also write JSON with the figures; claims of other methods in it are kept.")
    ] = None,
    kept: Kept = None,
    doc: Annotated[
        Path | None,
        typer.Option(help="Also write the page of the docs, of all claims in --out, to this Markdown file."),
    ] = None,
) -> None:
    """Check the papers' qualitative claims on a model at hand, and say of each whether it holds there."""
    import torch

    from kvlens import __version__
    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load
    from kvlens.lab.claims import written
    from kvlens.lab.claims.check import check, claiming, refuse_others
    from kvlens.lab.claims.page import VERDICTS, document
    from kvlens.runs.machine import machine
    from kvlens.text.outfile import check_file

    if prompts < 1:
        raise ValueError("--prompts must be at least 1.")
    check_file(out, "--out")
    check_file(doc, "--doc")
    if doc is not None and out is None:
        raise ValueError("--doc is made of a result file: name it with --out.")
    previous = json.loads(out.read_text(encoding="utf-8"))["methods"] if out is not None and out.exists() else {}
    if rest := {part["about"]["model"] for part in previous.values()} - {model}:
        raise ValueError(f"'{out}' holds claims checked on {min(rest)}: name another file for {model}.")
    choice = list(names(methods)) or claiming(model)
    refuse_others(choice, model)
    torch.set_num_threads(1)
    file = kept_file(kept, "claims", model)
    about = {
        "kvlens": __version__,
        "torch": torch.__version__,
        "machine": machine(),
        "model": model,
        "prompts": prompts,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    for name, results in check(Engine(load(model)), choice, prompts, lambda line: typer.echo(line, err=True), file):
        for claim in results:
            typer.echo(
                f"[{VERDICTS[claim.holds]}] {claim.source}: {claim.says}\n    {claim.measured}"
                + (f"\n    {claim.reason}" if claim.reason else "")
            )
        if out is not None:
            previous[name] = {"about": about, "claims": [written(claim) for claim in results]}
            write(out, {"methods": previous})
    if doc is not None:
        doc.write_text(document({"methods": previous}, model), encoding="utf-8")
    sys.stdout.flush()


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
