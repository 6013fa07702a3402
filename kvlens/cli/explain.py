"""`kvlens bench explain`: how many lost answers come back when what the attribution names is held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli.options import Model


def explain(
    model: Model = "demo",
    points: Annotated[
        str,
        typer.Option(help="METHOD:TASK:BUDGET, comma-separated; default: where each method loses on the demo model."),
    ] = "",
    length: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 2048,
    lost: Annotated[int, typer.Option(help="Lost trials per point.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt.")] = 9_500_000,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/results/explain.json"),
    kept: Annotated[Path, typer.Option(help="One line per prompt, so that an interrupted run continues.")] = Path(
        "runs/explain.jsonl"
    ),
    doc: Annotated[Path | None, typer.Option(help="Also write the page of the docs to this Markdown file.")] = None,
) -> None:
    """The share of lost answers restored by holding the triples with most regret, against random ones and the needle
    everywhere."""
    from kvlens.bench.explain import ExplainRequest, measure
    from kvlens.bench.explain import points as usual_points
    from kvlens.bench.explain_table import document, markdown
    from kvlens.bench.kept import check_file

    check_file(out, "--out")
    check_file(doc, "--doc")
    chosen = tuple(_point(part.strip()) for part in points.split(",") if part.strip()) or usual_points()

    def report(row: dict[str, Any]) -> None:
        came = "infeasible" if "infeasible" in row else "lost" if row["lost"] else "not lost, or full KV loses too"
        typer.echo(f"{row['method']} {row['task']} {row['budget']} prompt {row['index']}: {came}", err=True)

    result = measure(
        ExplainRequest(model, chosen, length, lost, seed), kept, report, lambda line: typer.echo(line, err=True)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if doc is not None:
        doc.write_text(document(result), encoding="utf-8")
    typer.echo(markdown(result))


def _point(text: str) -> tuple[str, str, str]:
    parts = text.split(":")
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"a point is METHOD:TASK:BUDGET, not '{text}'.")
    return parts[0], parts[1], parts[2]
