"""`kvlens calibrate`: what some methods need to know of a model before they can run, measured and kept with its
provenance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlens.cli.options import DEFAULT_MODEL, Device, Model
from kvlens.cli.train import show

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel
    from kvlens.prompts import PromptText

calibrate_app = typer.Typer(help="Measure what a method needs to know of a model.", no_args_is_help=True)

Texts = Annotated[list[Path] | None, typer.Argument(help="UTF-8 prompts to calibrate on; none: generated ones.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]


@calibrate_app.command("chess")
def chess(
    texts: Texts = None,
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("chess_thresholds.json"),
    prompts: Annotated[int, typer.Option(help="How many prompts are generated when no texts are given.", min=1)] = 128,
    max_new: Annotated[int, typer.Option(help="Tokens of each answer at most.", min=1)] = 256,
    percentile: Annotated[
        float, typer.Option(help="Of the pages' entropy and varentropy, above which they are high.")
    ] = 99.0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """When a model is uncertain: CHESS's thresholds on entropy and varentropy per page, from its answers with all of
    its cache."""
    from kvlens.methods.chess import calibrate as calibration

    loaded = _load(model, device, dtype)
    sources = _read(texts) or calibration.generated(loaded, prompts, max_new)
    typer.echo(str(calibration.calibrate(loaded, sources, out, max_new, percentile, show)))


@calibrate_app.command("compresskv")
def compresskv(
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
    from kvlens.methods.compresskv.calibrate import calibrate

    written = calibrate(
        _load(model, device, dtype), _read(texts) or None, out, trials=trials, length=length, report=show
    )
    typer.echo(str(written))


def _load(model: str, device: str, dtype: str) -> LoadedModel:
    import torch

    from kvlens.engine.models import load
    from kvlens.runs.request import SMALL

    loaded = load(model, device, dtype)
    if loaded.info["parameters"] < SMALL:
        torch.set_num_threads(1)
    return loaded


def _read(texts: list[Path] | None) -> list[PromptText]:
    from kvlens.prompts import decode

    for path in texts or []:
        if not path.is_file():
            raise ValueError(f"there is no text file '{path}'.")
    return [decode(path.read_bytes(), path.name) for path in texts or []]
