"""The name of a task that is read from a file: KIND:PATH, or KIND:PATH@NAME=VALUE@NAME=VALUE with parameters of the
kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_SET = re.compile(r"(?P<path>.*?)(?P<given>(@\w+=[\w.-]+)+)", re.DOTALL)


def split(said: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(path, what is set) of what stands behind KIND:. A file whose name looks like parameters is a file."""
    found = _SET.fullmatch(said)
    if found is None or Path(said).exists():
        return said, ()
    names = (part.partition("=") for part in found["given"].split("@")[1:])
    return found["path"], tuple((name, value) for name, _, value in names)


def values(kind: str, known: Mapping[str, int | str], given: tuple[tuple[str, str], ...]) -> dict[str, int | str]:
    """What is set, in the types of the defaults. Raises ValueError with one sentence."""
    found: dict[str, int | str] = {}
    for name, value in given:
        if name not in known:
            can = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"files of {kind} have no parameter '{name}'; {can}.")
        if name in found:
            raise ValueError(f"the parameter '{name}' is set twice.")
        if isinstance(known[name], str):
            found[name] = value
        elif re.fullmatch(r"[0-9]{1,9}", value):
            found[name] = int(value)
        else:
            raise ValueError(f"the parameter '{name}' of {kind} is a number, not '{value}'.")
    return found
