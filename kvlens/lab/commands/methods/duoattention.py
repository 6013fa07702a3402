"""`kvlens calibrate duoattention`."""

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
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("duoattention_gates.json"),
    steps: Annotated[int, typer.Option(help="Optimizer steps, a document each.", min=1)] = 30,
    length: Annotated[int, typer.Option(help="Tokens of a document.", min=256)] = 512,
    keys: Annotated[int, typer.Option(help="Passkeys in a document.", min=1, max=10)] = 4,
    words: Annotated[int, typer.Option(help="Words of a passkey.", min=1)] = 8,
    sinks: Annotated[int, typer.Option(help="First tokens a streaming head sees.", min=0)] = 16,
    recent: Annotated[int, typer.Option(help="Newest tokens a streaming head sees.", min=1)] = 64,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 0.05,
    weight: Annotated[float, typer.Option(help="Of the sum of all gates in the loss.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the documents.", min=0)] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Which KV heads of a model need all of its past: DuoAttention's gates, trained on documents that recite what they
    hide."""
    from kvlens.lab.calibrate.methods import duoattention as training

    settings = training.Settings(steps, length, keys, words, sinks, recent, rate, weight, seed)
    argument = [source.text for source in read_texts(texts)]
    written = training.calibrate(load_model(model, device, dtype), out, argument, settings, show, describe_files(texts))
    typer.echo(str(written))
