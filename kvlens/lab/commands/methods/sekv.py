"""`kvlens train sekv`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlens.cli.options import DEFAULT_MODEL, Device, Model
from kvlens.lab.commands.train import show


def train(
    documents: Annotated[
        list[Path] | None,
        typer.Argument(help="Long UTF-8 text files; none: a book and code; for the demo model, generated ones."),
    ] = None,
    model: Model = DEFAULT_MODEL,
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
    training: Annotated[
        list[str] | None,
        typer.Option("--train", help="A setting of the training (SeKVTraining): name=value; may be repeated."),
    ] = None,
    code: Annotated[
        bool, typer.Option("--code", help="Train on long modules of Python's standard library too, and cut the texts.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after so many seconds; run again to continue. None: no limit.")
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option()] = "float32",
) -> None:
    """Train SeKV's router (W, tau, gates; the paper's section 3.3) for a model; the model stays as it is."""
    if not documents and model == "demo":
        from kvlens.lab.training.sekv.demo import train_router

        typer.echo(str(train_router(out, steps, batch, progress=show)))
        return
    from kvlens import methods
    from kvlens.engine.models import load
    from kvlens.lab.training.sekv import corpus
    from kvlens.lab.training.sekv.settings import settings_of
    from kvlens.lab.training.sekv.train import train_sekv
    from kvlens.runs.request import default_preset, parse_set
    from kvlens.text.promptfiles import decode

    books = [(path.name, decode(path.read_bytes(), path.name).text) for path in documents or []]
    if code:
        texts, names = corpus.books_and_code(books)
    elif books:
        texts, names = [text for _, text in books], [name for name, _ in books]
    else:
        texts, names = corpus.documents(), corpus.named()
    params = methods.make_parameters(
        methods.get("sekv"), preset or default_preset("sekv", model), {"router": "trained", **parse_set(set_ or [])}
    )
    settings = settings_of(
        {"batch": str(batch)} | ({"lengths": lengths} if lengths else {}) | parse_set(training or [], "--train")
    )
    loaded = load(model, device, dtype)
    about = {"model": model, "documents": names}
    path = train_sekv(loaded.model, loaded.tokenizer, out, steps, texts, params, settings, show, about, seconds=seconds)
    typer.echo(str(path))
