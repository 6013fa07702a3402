"""`kvlens bench text`: how far a method's next-token distributions are from full KV's on a real text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli.bench import Budgets, Methods, Minutes
from kvlens.cli.options import Model


def text(
    model: Model = "demo",
    methods: Methods = "",
    budgets: Budgets = "10%,20%,40%",
    length: Annotated[int, typer.Option(help="Tokens of context.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens fed behind it, at least 64; each is compared.")] = 64,
    passages: Annotated[int, typer.Option(help="Passages of the text.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the first passage.")] = 7_000_000,
    minutes: Minutes = 60.0,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/results/text.json"),
    kept: Annotated[
        Path, typer.Option(help="One line per finished trial, so that an interrupted run continues.")
    ] = Path("runs/text.jsonl"),
) -> None:
    """KL and top-1 agreement with full KV, token by token of a real text, by method and budget; beside them full KV in
    other number formats."""
    from kvlens.bench.freetext import FreeTextRequest, markdown, measure
    from kvlens.bench.kept import check_file

    check_file(out, "--out")
    given = {"methods": methods, "budgets": budgets}
    lists = {name: tuple(part.strip() for part in said.split(",") if part.strip()) for name, said in given.items()}
    request = FreeTextRequest(
        model=model,
        length=length,
        tokens=tokens,
        passages=passages,
        first_seed=seed,
        minutes=minutes,
        **{name: names for name, names in lists.items() if names},
    )

    def report(done: int, total: int, row: dict[str, Any]) -> None:
        came = f"KL {row['kl']:.4f}" if "kl" in row else f"infeasible, needs {row['infeasible']:.1%}"
        typer.echo(f"{done}/{total} {row['key']}: {came}", err=True)

    result = measure(request, kept, report, lambda line: typer.echo(line, err=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    typer.echo(markdown(result))
