"""`kvlens bench`: quality at equal budgets, the papers' claims, and what a GPU does. All write JSON with its provenance."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

bench_app = typer.Typer(help="Measure the methods; every result carries machine, versions and date.", no_args_is_help=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@bench_app.command("quality")
def quality(
    model: Annotated[str, typer.Option(help="'demo', a local folder or a hub id.")] = "demo",
    methods: Annotated[str, typer.Option(help="Comma-separated; default: the five systems, full and streaming_llm.")] = "",
    tasks: Annotated[str, typer.Option(help="needle, multikey, list, chain, note; comma-separated.")] = "needle,multikey,list",
    budgets: Annotated[str, typer.Option(help="Shares of full KV, comma-separated.")] = "5%,10%,20%",
    length: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 2048,
    prompts: Annotated[int, typer.Option(help="Prompts per task.")] = 25,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt.")] = 8_000_000,
    minutes: Annotated[float, typer.Option(help="Stop after this long; run again to continue.")] = 60.0,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/results/quality.json"),
    kept: Annotated[Path, typer.Option(help="One line per finished trial, so that an interrupted run continues.")] = Path(
        "runs/quality.jsonl"
    ),
    doc: Annotated[Path | None, typer.Option(help="Also write the page of the docs to this Markdown file.")] = None,
) -> None:
    """Exact match, coverage, attended tokens and bytes of every method on the same generated prompts at the same budgets."""
    from kvlens.bench.quality import QualityRequest, document, markdown, measure

    chosen: dict[str, Any] = {"methods": _names(methods)} if methods else {}
    request = QualityRequest(
        model=model, tasks=_names(tasks), budgets=_names(budgets), length=length, prompts=prompts, first_seed=seed, minutes=minutes,
        **chosen,
    )  # fmt: skip

    def report(done: int, total: int, row: dict[str, Any]) -> None:
        came = f"exact {row['exact']:.0f}" if "exact" in row else f"infeasible, needs {row['infeasible']:.1%}"
        typer.echo(f"{done}/{total} {row['key']}: {came}", err=True)

    result = measure(request, kept, report)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if doc is not None:
        doc.write_text(document(result), encoding="utf-8")
    typer.echo(markdown(result))


@bench_app.command("claims")
def claims(
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all that have claims.")] = "",
    model: Annotated[str, typer.Option(help="'demo', a local folder or a hub id.")] = "demo",
    prompts: Annotated[int, typer.Option(help="Prompts per point.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Also write JSON with the figures; claims of other methods in it are kept.")] = None,
) -> None:
    """Check the papers' qualitative claims on a model at hand, and say of each whether it holds here."""
    import torch

    from kvlens import __version__
    from kvlens.bench.claims import METHODS, check
    from kvlens.engine import Engine
    from kvlens.machine import machine
    from kvlens.models import load

    if prompts < 1:
        raise ValueError("--prompts must be at least 1.")
    names = list(_names(methods)) or list(METHODS)
    torch.set_num_threads(1)
    found = check(Engine(load(model)), names, prompts, lambda line: typer.echo(line, err=True))
    for claim in found:
        verdict = {True: "holds", False: "does not hold", None: "cannot be decided"}[claim.holds]
        typer.echo(f"[{verdict}] {claim.source}: {claim.says}\n    {claim.measured}" + (f"\n    {claim.reason}" if claim.reason else ""))
    if out is not None:
        about = {
            "kvlens": __version__, "torch": torch.__version__, "machine": machine(), "model": model, "prompts": prompts,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }  # fmt: skip
        before = json.loads(out.read_text(encoding="utf-8"))["methods"] if out.exists() else {}
        for name in names:
            before[name] = {"about": about, "claims": [dataclasses.asdict(c) for c in found if c.method == name]}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"methods": before}, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()


@bench_app.command("gpu")
def gpu(
    out: Annotated[Path, typer.Option(help="Folder of the result file, gpu-<device>.json.")] = Path("benchmarks/results"),
    minutes: Annotated[float, typer.Option(help="No part is begun after this long; run again to continue.")] = 10.0,
    parts: Annotated[str, typer.Option(help="Beginnings of parts' names, comma-separated; default: all.")] = "",
    contexts: Annotated[str, typer.Option(help="Tokens, comma-separated; default: 8192,32768,131072.")] = "",
    batches: Annotated[str, typer.Option(help="Sequences, comma-separated; default: 1,8.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny shapes on the CPU; the figures mean nothing.")] = False,
) -> None:
    """Ceilings, kernels, and one decode step's attention path at the shape of an 8B model, on the first CUDA device."""
    from kvlens.bench.gpu.run import Request, measure, numbers

    request = Request(out, minutes, _names(parts), dry_run, numbers(contexts), numbers(batches))
    typer.echo(measure(request, lambda line: typer.echo(line, err=True)).name)
