"""What went wrong, in one sentence, and what to do about it."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from kvlens import PACKAGE
from kvlens.shortage import Shortage

SOURCES = PACKAGE


class Lacking(RuntimeError):
    """Something that a part needs is not here: a package, a model, time. One sentence, and what to do about it."""

    def __init__(self, reason: str, todo: str) -> None:
        super().__init__(reason)
        self.todo = todo


def sentence(problem: BaseException, smaller: str) -> tuple[str, str | None]:
    """(reason, what to do or None). `smaller`: the setting that takes less memory. What nobody has foreseen says where
    it came from."""
    while isinstance(problem, ImportError) and isinstance(problem.__cause__, ImportError):
        problem = (
            problem.__cause__
        )  # a library that loads its parts when they are asked for names the part, not what it lacks
    head_item = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    if isinstance(problem, Lacking):
        return f"{head_item[:1].upper()}{head_item[1:]}", problem.todo
    if isinstance(problem, torch.OutOfMemoryError):
        return f"The device ran out of memory: {head_item}", smaller
    if isinstance(problem, Shortage):
        return f"{head_item[:1].upper()}{head_item[1:]}", None
    if isinstance(problem, MemoryError):
        return "The host ran out of memory.", smaller
    if ("pin" in head_item.lower() and "memory" in head_item.lower()) or "cudaHost" in head_item:
        return (
            f"Pinned host memory could not be had: {head_item}",
            "raise the limit on locked memory (ulimit -l), or free host memory",
        )
    return f"{type(problem).__name__}: {head_item}{_place(problem)}", None


def _place(problem: BaseException) -> str:
    """The last line of kvlens's own that it went through."""
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(SOURCES):
            return f" ({path.relative_to(SOURCES.parent).as_posix()}, line {frame.lineno})"
    return ""
