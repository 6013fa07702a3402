"""`kvlens calibrate compresskv`."""

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
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("compresskv_heads.json"),
    trials: Annotated[int, typer.Option(help="Prompts to measure on.", min=1)] = 40,
    length: Annotated[int, typer.Option(help="Tokens of a generated prompt.", min=64)] = 1024,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Which heads of a model retrieve, and how much each layer loses: CompressKV's head scores and layer errors.

    Texts hide generated needles in their sentences; a .json prompt with an answer and a needle is asked as it is.
    """
    from kvlens.lab.calibrate.methods import compresskv as measuring

    loaded = load_model(model, device, dtype)
    sources = read_texts(texts) or None
    written = measuring.calibrate(loaded, sources, out, trials, length, show, texts=describe_files(texts))
    typer.echo(str(written))
