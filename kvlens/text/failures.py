"""Sentences about errors that kvlens did not foresee, for the command line and the pages."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

CODE = "unexpected_error"
FILE_CODE = "file_failed"
DEBUG = "KVLENS_DEBUG"
"""environment variable: set, errors show where they were raised"""
_LONGEST = 200


def debugging() -> bool:
    """Return True if errors are to show where they were raised."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def unexpected(problem: BaseException, remedy: str) -> str:
    """Return one sentence for an error that kvlens did not foresee: its code, its kind, its text, where it was raised.
    remedy: how the reader sees more of it."""
    frames = traceback.extract_tb(problem.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    text = one_line(str(problem))
    return f"{CODE}: {type(problem).__name__}{f' ({text})' if text else ''}{place}; {remedy}."


def file_failed(problem: OSError) -> str:
    """Return one sentence for a file that the system refused."""
    if problem.errno is None or problem.strerror is None:
        return one_line(str(problem))
    name = f"'{problem.filename}'" if problem.filename is not None else "standard output or a file"
    return (
        f"{FILE_CODE}: {name} cannot be used ({problem.strerror}); check the path, its permissions and the free space."
    )


def one_line(text: str) -> str:
    """Return a foreign error's text on one line, cut to a length that a sentence can hold."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
