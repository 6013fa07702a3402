"""The file that keeps finished trials, one JSON object a line, so that an interrupted measurement goes on where it
stopped."""

from __future__ import annotations

import fcntl
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvlens.refusal import Refusal
from kvlens.text.outfile import check_file
from kvlens.text.plaintext import strict_json

Request = TypeVar("Request")
Result = TypeVar("Result")
More = ParamSpec("More")
Measure = Callable[Concatenate[Request, Path, More], Result]


def alone(measure: Measure[Request, More, Result]) -> Measure[Request, More, Result]:
    """`measure(request, kept, ...)`, refused while another process measures into the same file: both would do the same
    trials. The kernel gives the file back however the process ends. Raises ValueError with one sentence."""

    @functools.wraps(measure)
    def measured(request: Request, kept_tokens: Path, /, *more: More.args, **named: More.kwargs) -> Result:
        check_file(kept_tokens, "--kept")
        kept_tokens.parent.mkdir(parents=True, exist_ok=True)
        with kept_tokens.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"another process is measuring into '{kept_tokens.name}': wait until it ends, or name another file."
                ) from None
            return measure(request, kept_tokens, *more, **named)

    return measured


def read(path: Path, needed: tuple[str, ...], comparable: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Trials of earlier calls that are still comparable. A last line cut by an interruption is dropped, other rows stay
    in the file.

    Raises ValueError for a place where no file can be, and for a file of something else: a line that is no object or
    lacks one of the `needed` fields.
    """
    check_file(path, "--kept")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    rows = []
    for line in data[:whole].split(b"\n")[:-1]:  # by nothing but line feeds: an output may hold other line separators
        row = _row(line, needed)
        if row is None:
            raise Refusal(
                f"'{path.name}' does not hold trials of this benchmark: name another file.",
                code="no_trials",
                file=path.name,
            )
        if comparable(row):
            rows.append(row)
    cut = data[whole:]
    if cut and not whole and not (cut.startswith(b'{"') and not cut.endswith(b"}")):  # no line of ours before it
        raise Refusal(
            f"'{path.name}' does not hold trials of this benchmark: name another file.",
            code="no_trials",
            file=path.name,
        )
    if cut:
        os.truncate(path, whole)
    return rows


def silent(line: str) -> None:
    """For measurements nobody listens to."""


def _row(line: bytes, needed: tuple[str, ...]) -> dict[str, Any] | None:
    """The trial of a line; None for something else."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and all(name in row for name in needed) else None


def append(path: Path, row: dict[str, Any]) -> None:
    """Writes one row and waits until it is on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(strict_json(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
