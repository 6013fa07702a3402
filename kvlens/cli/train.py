"""`kvlens train`: the embedded demo model, and SeKV's router for any supported model. Both show progress and can be
resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli.options import Device, Model

train_app = typer.Typer(help="Train the embedded demo model or a method's own parameters.", no_args_is_help=True)


def show(figures: dict[str, Any]) -> None:
    """One JSON line of progress."""
    typer.echo(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))


@train_app.command("demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, log and model; run again to continue.")] = Path(
        "build/demo-model"
    ),
    minutes: Annotated[
        float | None, typer.Option(help="Nominal minutes on two idle cores; scales the number of steps.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew even if there is a checkpoint.")] = False,
) -> None:
    """Make the demo model from scratch: documents, tokenizer, weights."""
    from kvlens.demo.schedule import FULL_MINUTES
    from kvlens.demo.train import train_demo

    folder = train_demo(out, FULL_MINUTES if minutes is None else minutes, seed, not fresh)
    typer.echo(str(folder))


@train_app.command("sekv")
def sekv(
    documents: Annotated[
        list[Path] | None, typer.Argument(help="Long UTF-8 text files; none: generated ones, for the demo model.")
    ] = None,
    model: Model = "demo",
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, log and router; run again to continue.")] = Path(
        "build/sekv-router"
    ),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 300,
    batch: Annotated[int, typer.Option(help="Documents per step.")] = 2,
    lengths: Annotated[
        str, typer.Option(help="Length curriculum in tokens, comma-separated; an equal share of the steps each.")
    ] = "",
    preset: Annotated[
        str | None, typer.Option(help="SeKV preset whose segmentation and sizes are trained for.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of SeKV: name=value; may be repeated.")
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option()] = "float32",
) -> None:
    """Train SeKV's router (W, tau, gates; the paper's section 3.3) for a model; the model stays as it is."""
    if not documents and model == "demo":
        from kvlens.demo.train_router import train_router

        typer.echo(str(train_router(out, steps, batch, progress=show)))
        return
    if not documents:
        raise ValueError("give text files to train on: only the demo model has generated documents.")
    from kvlens import methods
    from kvlens.engine.models import load
    from kvlens.methods.sekv.training.train import SeKVTraining, train_sekv
    from kvlens.prompts import decode
    from kvlens.runs.request import default_preset, parse_set

    texts = [decode(path.read_bytes(), path.name).text for path in documents]
    params = methods.make_parameters(
        methods.get("sekv"), preset or default_preset("sekv", model), {"router": "trained", **parse_set(set_ or [])}
    )
    loaded = load(model, device, dtype)
    settings = SeKVTraining(batch=batch)
    if lengths:
        settings = SeKVTraining(batch=batch, lengths=tuple(int(n) for n in lengths.split(",")))
    about = {"model": model, "documents": [path.name for path in documents]}
    typer.echo(str(train_sekv(loaded.model, loaded.tokenizer, out, steps, texts, params, settings, show, about)))
