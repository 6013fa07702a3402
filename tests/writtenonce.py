"""Folders of made-up runs are written once in a process and copied for each test that asks for its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

_KEPT = tempfile.TemporaryDirectory(prefix="kvlens-runs-")


class InFolder(Protocol):
    """A dataclass that says where its runs lie."""

    @property
    def folder(self) -> Path: ...


Made = TypeVar("Made", bound=InFolder)


def written_once(write: Callable[[Path], Made]) -> Callable[[Path], Made]:
    """`write`, which puts the same runs into every folder it is given, for a few hundredths of its time from the second
    call on."""

    @cache
    def first() -> Made:
        return write(Path(tempfile.mkdtemp(dir=_KEPT.name)))

    @wraps(write)
    def copied(folder: Path) -> Made:
        made: Any = first()
        shutil.copytree(made.folder, folder, dirs_exist_ok=True)
        return replace(made, folder=folder)

    return copied
