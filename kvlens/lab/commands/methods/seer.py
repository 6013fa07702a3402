"""`kvlens train seer`."""

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
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("seer.safetensors"),
    page: Annotated[int, typer.Option(help="Tokens of a block.", min=2)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a document.", min=64)] = 2048,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 1000,
    rate: Annotated[float, typer.Option(help="Learning rate at first.", min=0)] = 1e-2,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option()] = "float32",
) -> None:
    """Train SeerAttention-R's gate for a model; the model stays as it is."""
    from kvlens.engine.models import load
    from kvlens.lab.training.seer.documents import list_documents
    from kvlens.lab.training.seer.train import SeerTraining, train_seer
    from kvlens.text.promptfiles import decode

    loaded = load(model, device, dtype)
    books = [(path.name, decode(path.read_bytes(), path.name).text) for path in documents or []]
    texts, about = list_documents(loaded, books)
    settings = SeerTraining(page=page, length=length, steps=steps, learning_rate=rate)
    typer.echo(str(train_seer(loaded, texts, out, settings, show, about)))
