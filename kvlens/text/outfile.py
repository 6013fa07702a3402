"""Files that a command is asked to write."""

from __future__ import annotations

import os
from pathlib import Path


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
