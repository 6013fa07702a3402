"""The file that keeps finished trials, one JSON object a line, so that an interrupted measurement goes on where it
stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


def read(kept: Path, needed: tuple[str, ...], comparable: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Trials of earlier calls that are still comparable. A last line cut by an interruption is dropped, other rows stay
    in the file.

    Raises ValueError for a place where no file can be, and for a file of something else: a line that is no object or
    lacks one of the `needed` fields.
    """
    check_file(kept, "--kept")
    kept.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = kept.read_text(encoding="utf-8") if kept.exists() else ""
    except UnicodeDecodeError:
        raise ValueError(f"'{kept.name}' does not hold trials of this benchmark: name another file.") from None
    lines, rows = text.splitlines(), []
    for place, line in enumerate(lines):
        try:
            row = json.loads(line)
            for name in needed:
                row[name]
        except (ValueError, KeyError, TypeError):
            if place == len(lines) - 1 and not text.endswith("\n"):
                break
            raise ValueError(f"'{kept.name}' does not hold trials of this benchmark: name another file.") from None
        if comparable(row):
            rows.append(row)
    if lines and not text.endswith("\n"):
        kept.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    return rows


def silent(line: str) -> None:
    """For measurements nobody listens to."""


def append(kept: Path, row: dict[str, Any]) -> None:
    """Writes one row and waits until it is on the disk."""
    with kept.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
