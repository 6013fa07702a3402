"""`kvlens bench explain`: how many lost answers come back when what the attribution names is held."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli.options import DEFAULT_MODEL, Device, Model
from kvlens.lab.commands.results import Kept, Out, beside, kept_file, out_file, write


def explain(
    model: Model = DEFAULT_MODEL,
    points: Annotated[
        str,
        typer.Option(
            help="METHOD:TASK:BUDGET, comma-separated; default: where each method loses on the demo model, three tasks "
            "at 10 % on any other."
        ),
    ] = "",
    length: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 2048,
    lost: Annotated[int, typer.Option(help="Lost trials per point.")] = 50,
    prompts: Annotated[int | None, typer.Option(help="Prompts per point at most; default: 4 times --lost.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt.")] = 9_500_000,
    device: Device = "cpu",
    controls: Annotated[
        int, typer.Option(help="Every so manieth prompt also gets the controls: one triple, random ones, the needle.")
    ] = 1,
    out: Out = None,
    kept: Kept = None,
    collect: Annotated[
        list[Path] | None,
        typer.Option(help="Run nothing: the table of the trials in this --kept file; repeat it for several files."),
    ] = None,
    doc: Annotated[
        Path | None,
        typer.Option(help="Also write the page of the docs, of all such tables beside --out, to this Markdown file."),
    ] = None,
) -> None:
    """The share of lost answers restored by holding what a stored run shows first, against random triples and the
    needle everywhere."""
    from kvlens.lab.bench.explain import ExplainRequest, measure
    from kvlens.lab.bench.explain import collect as collect_trials
    from kvlens.lab.results.explain_table import document, markdown
    from kvlens.lab.results.explain_table import points as usual_points
    from kvlens.text.outfile import check_file

    target, trials = out_file(out, "explain", model), kept_file(kept, "explain", model)
    check_file(doc, "--doc")
    choice = tuple(_point(part.strip()) for part in points.split(",") if part.strip()) or usual_points(model)

    def report(row: dict[str, Any]) -> None:
        came = "lost" if row["lost"] else "not lost, or full KV loses too"
        came = row.get("refused") or ("infeasible" if "infeasible" in row else came)
        typer.echo(f"{row['method']} {row['task']} {row['budget']} prompt {row['index']}: {came}", err=True)

    request = ExplainRequest(model, choice, length, lost, seed, prompts, device, controls)
    if collect:
        result = collect_trials(request, collect)
    else:
        result = measure(request, trials, report, lambda line: typer.echo(line, err=True))
    write(target, result)
    if doc is not None:
        doc.write_text(document(beside(target, "explain", result)), encoding="utf-8")
    typer.echo(markdown(result))


def _point(text: str) -> tuple[str, str, str]:
    parts = text.split(":")
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"a point is METHOD:TASK:BUDGET, not '{text}'.")
    return parts[0], parts[1], parts[2]
