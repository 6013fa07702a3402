"""`kvlens calibrate loki`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlens.cli.options import DEFAULT_MODEL, Device, Model
from kvlens.lab.commands.calibrate import Dtype, Texts, describe_files, load_model, read_texts
from kvlens.lab.commands.train import show


def calibrate(
    texts: Texts = None,
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("loki.safetensors"),
    prompts: Annotated[int, typer.Option(help="Prompts to read, where no texts are given.", min=1)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a generated prompt.", min=128)] = 1024,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """The principal components of each KV head's keys: Loki's axes for a model."""
    from kvlens.lab.calibrate.methods import loki as measuring

    loaded = load_model(model, device, dtype)
    sources = read_texts(texts) or None
    written = measuring.calibrate(loaded, sources, out, prompts, length, show, texts=describe_files(texts))
    typer.echo(str(written))
