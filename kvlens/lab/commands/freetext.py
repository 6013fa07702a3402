"""`kvlens bench text`: how far a method's next-token distributions are from full KV's on a real text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvlens.cli.options import DEFAULT_MODEL, Model
from kvlens.lab.commands.bench import Budgets, Methods, Minutes
from kvlens.lab.commands.results import Kept, Out, kept_file, out_file, write


def text(
    model: Model = DEFAULT_MODEL,
    methods: Methods = "",
    budgets: Budgets = "10%,20%,40%",
    length: Annotated[int, typer.Option(help="Tokens of context.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens fed behind it, at least 64; each is compared.")] = 64,
    passages: Annotated[int, typer.Option(help="Passages of the text.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the first passage.")] = 7_000_000,
    batch: Annotated[int, typer.Option(help="Trials of a passage whose decode steps are computed together.")] = 1,
    minutes: Minutes = 60.0,
    out: Out = None,
    kept: Kept = None,
) -> None:
    """KL and top-1 agreement with full KV, token by token of a real text, by method and budget; beside them full KV in
    other number formats."""
    from kvlens.lab.bench.freetext import measure
    from kvlens.lab.bench.textpage import markdown
    from kvlens.lab.bench.textrequest import FreeTextRequest

    target, trials = out_file(out, "text", model), kept_file(kept, "text", model)
    source = {"methods": methods, "budgets": budgets}
    lists = {
        name: tuple(part.strip() for part in sentence.split(",") if part.strip()) for name, sentence in source.items()
    }
    request = FreeTextRequest(
        model=model,
        length=length,
        tokens=tokens,
        passages=passages,
        first_seed=seed,
        batch=batch,
        minutes=minutes,
        **{name: names for name, names in lists.items() if names},
    )

    def report(finished: int, total: int, row: dict[str, Any]) -> None:
        typer.echo(f"{finished}/{total} {row['key']}: {_came(row)}", err=True)

    result = measure(request, trials, report, lambda line: typer.echo(line, err=True))
    write(target, result)
    typer.echo(markdown(result))


def _came(row: dict[str, Any]) -> str:
    """Return what came of a trial."""
    if "kl" in row:
        return f"KL {row['kl']:.4f}"
    return str(row["refused"]) if "refused" in row else f"infeasible, needs {row['infeasible']:.1%}"
