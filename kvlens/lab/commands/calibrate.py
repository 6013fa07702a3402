"""`kvlens calibrate NAME`: what a method needs to know of a model before it can run, measured and kept with its
provenance. The commands are the methods' own (their part `commands`); what they share is here."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli.options import DEFAULT_MODEL, Device, Model
from kvlens.lab.commands.method_commands import MethodCommands

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel
    from kvlens.text.prompts import PromptText

calibrate_app = typer.Typer(
    help="Measure what a method needs to know of a model.", no_args_is_help=True, cls=MethodCommands
)

Texts = Annotated[list[Path] | None, typer.Argument(help="UTF-8 prompts to calibrate on; none: generated ones.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]


@calibrate_app.command("heads")
def heads(
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("heads.json"),
    tokens: Annotated[int, typer.Option(help="Tokens drawn; fewer where the context is too short.", min=8)] = 2500,
    repeats: Annotated[int, typer.Option(help="How often they are read.", min=2)] = 4,
    seed: Annotated[int, typer.Option(help="Of the tokens drawn.", min=0)] = 0,
    needles: Annotated[int, typer.Option(help="Needle prompts whose answers are copied; 0: none.", min=0)] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a needle prompt; fewer as above.", min=256)] = 2048,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Which heads look back to where they read the same before: a map for methods that divide heads by it."""
    from kvlens.lab.calibrate.heads import calibrate

    loaded = load_model(model, device, dtype)
    typer.echo(str(calibrate(loaded, out, tokens, repeats, seed, needles, length)))


def load_model(model: str, device: str, dtype: str) -> LoadedModel:
    """The model to measure; a small one on one thread. Raises ValueError with one sentence."""
    import torch

    from kvlens.engine.models import load
    from kvlens.runs.request import SMALL

    loaded = load(model, device, dtype)
    if loaded.info["parameters"] < SMALL:
        torch.set_num_threads(1)
    return loaded


def read_texts(texts: list[Path] | None) -> list[PromptText]:
    """The prompts in the files. Raises ValueError with one sentence."""
    from kvlens.text.promptfiles import decode

    for path in texts or []:
        if not path.is_file():
            raise ValueError(f"there is no text file '{path}'.")
    return [decode(path.read_bytes(), path.name) for path in texts or []]


def describe_files(texts: list[Path] | None) -> list[dict[str, Any]]:
    """The files that were measured on, for the provenance: name, bytes and SHA-256 of each."""
    contents = [(path.name, path.read_bytes()) for path in texts or []]
    return [{"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents]
