"""Files that a command is asked to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvlens.refusal import Refusal


def check_file(path: Path | None, option: str) -> None:
    """ValueError, one sentence, unless a file can be written at `path`, which `option` named; None: nothing is to be
    written. Changes nothing."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} '{path}' is a folder: name a file in it.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{option} '{path}' cannot be written: '{above.name}' is a file, not a folder.")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise ValueError(f"{option} '{path}' cannot be written: permission denied.")


def format_of(path: Path | None, name: str | None, formats: Sequence[str]) -> str:
    """Return the format that is written to a file: the named one, else that of the file's ending, else the usual one.

    Args:
        path: the file that --out names; None: standard output.
        name: what --format names; None: nothing.
        formats: the known ones, the usual one first.

    Raises Refusal `unknown_ending` for an ending that is no known format, where none is named, and `other_ending` for
    that of another format than the named one.
    """
    ending = "" if path is None else path.suffix.lower().removeprefix(".")
    if name is None and ending and ending not in formats:
        endings = " or ".join(f".{each}" for each in formats)
        raise Refusal(
            f"--out '{path}' has no known format: let it end with {endings}.", code="unknown_ending", ending=ending
        )
    if name is not None and ending in formats and ending != name:
        sentence = f"--out '{path}' ends with .{ending}, and --format names {name}: let both name one format."
        raise Refusal(sentence, code="other_ending", ending=ending)
    return name or ending or formats[0]
