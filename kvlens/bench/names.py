"""Names that a request may hold: of methods and tasks, refused with the known ones where there is none of that name."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from kvlens import methods, tasks


def _methods(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        methods.get(name)
    return names


def _tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        tasks.get(name)
    return names


MethodNames = Annotated[tuple[str, ...], AfterValidator(_methods)]
TaskNames = Annotated[tuple[str, ...], AfterValidator(_tasks)]
