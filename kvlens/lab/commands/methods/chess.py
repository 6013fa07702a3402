"""`kvlens calibrate chess`."""

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
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("chess_thresholds.json"),
    prompts: Annotated[int, typer.Option(help="How many prompts are generated when no texts are given.", min=1)] = 128,
    excerpts: Annotated[
        int,
        typer.Option(
            help="Cut the texts into so many excerpts and ask for long answers; 0: the texts as they are.", min=0
        ),
    ] = 0,
    max_new: Annotated[int, typer.Option(help="Tokens of each answer at most.", min=1)] = 256,
    percentile: Annotated[
        float, typer.Option(help="Of the pages' entropy and varentropy, above which they are high.")
    ] = 99.0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """When a model is uncertain: CHESS's thresholds on entropy and varentropy per page, from its answers with all of
    its cache."""
    from kvlens.lab.calibrate.methods import chess as measuring

    loaded = load_model(model, device, dtype)
    sources = read_texts(texts)
    if sources and excerpts:
        sources = measuring.excerpts(loaded, sources, excerpts, max_new)
    result = sources or measuring.generated(loaded, prompts, max_new)
    typer.echo(str(measuring.calibrate(loaded, result, out, max_new, percentile, show, describe_files(texts))))
