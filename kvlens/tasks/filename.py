"""The name of a task that is read from a file: KIND:PATH, or KIND:PATH@NAME=VALUE@NAME=VALUE with parameters of the
kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kvlens.refusal import Refusal

_SET = re.compile(r"(?P<path>.*?)(?P<given>(@\w+=[\w.-]+)+)", re.DOTALL)


def split(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(path, what is set) of what stands behind KIND:. A file whose name looks like parameters is a file."""
    results = _SET.fullmatch(text)
    if results is None or Path(text).exists():
        return text, ()
    names = (part.partition("=") for part in results["given"].split("@")[1:])
    return results["path"], tuple((name, value) for name, _, value in names)


def values(
    kind: str, known_values: Mapping[str, int | str], pairs: tuple[tuple[str, str], ...]
) -> dict[str, int | str]:
    """What is set, in the types of the defaults. Raises ValueError with one sentence."""
    mapping: dict[str, int | str] = {}
    for name, value in pairs:
        if name not in known_values:
            can = f"it has {', '.join(known_values)}" if known_values else "it has none"
            raise Refusal(
                f"files of {kind} have no parameter '{name}'; {can}.",
                code="unknown_parameter",
                parameter=name,
                known=tuple(known_values),
            )
        if name in mapping:
            raise ValueError(f"the parameter '{name}' is set twice.")
        if isinstance(known_values[name], str):
            mapping[name] = value
        elif re.fullmatch(r"[0-9]{1,9}", value):
            mapping[name] = int(value)
        else:
            raise ValueError(f"the parameter '{name}' of {kind} is a number, not '{value}'.")
    return mapping
