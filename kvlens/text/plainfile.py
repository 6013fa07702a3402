"""Files that come from elsewhere, read within bounds: ordinary files of a size that is looked at first, JSON that is
not nested without end. A pipe or a device, which would block the reader or never end, is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_JSON = 256 << 20
"""bytes of a JSON file; the largest tokenizers have some 40 MB"""
DENSE_FROM, DENSE_SHARE = 1 << 30, 8
"""a file of more bytes than the first is on the disk with more than one part in the second, unless it has holes"""


class RefusedFile(ValueError):
    """A file that is not read. `code`: not_ordinary | too_large | full_of_holes | not_json | nested_too_deep."""

    def __init__(self, code: str, path: Path, problem: str) -> None:
        super().__init__(f"{code}: '{path}' {problem}.")
        self.code, self.path = code, path


def check_ordinary(path: Path, most: int | None = None) -> None:
    """Raise RefusedFile for a pipe, a socket or a device, for more than `most` bytes, and for a large file that is
    mostly holes. Links are followed. Raises OSError if there is no such file."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise RefusedFile("not_ordinary", path, "is no ordinary file: give a file, not a pipe, a device or a folder")
    if most is not None and about.st_size > most:
        raise RefusedFile(
            "too_large", path, f"has {about.st_size:,} bytes, at most {most:,} are read: give a part of it"
        )
    if about.st_size > DENSE_FROM and about.st_blocks * 512 * DENSE_SHARE < about.st_size:
        raise RefusedFile(
            "full_of_holes", path, f"claims {about.st_size:,} bytes and holds {about.st_blocks * 512:,}: fetch it again"
        )


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of an ordinary file of at most `most` bytes. Raises RefusedFile, and OSError."""
    check_ordinary(path, most)
    with open(path, "rb") as file:
        return file.read(most)


def load_json(path: Path, most: int = MOST_JSON) -> Any:
    """Return the value of a JSON file. Raises RefusedFile, and OSError."""
    try:
        return json.loads(read_bounded(path, most).decode("utf-8-sig"))
    except RecursionError:
        raise RefusedFile("nested_too_deep", path, "is nested too deep to be read: write it flat") from None
    except RefusedFile:
        raise
    except ValueError as error:
        raise RefusedFile("not_json", path, f"is not valid JSON ({str(error)[:120]}): mend or replace it") from None
