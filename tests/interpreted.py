"""Triton's interpreter, which puts its own functions in the place of the language's at each launch and each call of a
helper: a third of its time went into looking through the language for them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any


class Found:
    """inspect.getmembers for the interpreter: those names of a module or class of the language that it replaces, looked
    for once. What they stand for is read each time."""

    def __init__(self) -> None:
        self._names: dict[Any, list[str]] = {}

    def __call__(self, package: Any) -> list[tuple[str, Any]]:
        from triton.language.core import is_builtin

        if package not in self._names:
            self._names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        return [(name, getattr(package, name)) for name in self._names[package]]


def quick_interpreter() -> None:
    """Kernels are interpreted as before, and launched faster."""
    from triton.runtime import interpreter

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": Found()})
