"""Packages whose name is also a function of the API: `kvlens.methods()`, `kvlens.runs(outcome="lost")`."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallPackage(ModuleType):
    """A package that, called, is the function of the same name in kvlens.api."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        function = getattr(import_module("kvlens.api"), self.__name__.rpartition(".")[2])
        return function(*arguments, **keywords)


def callable_package(name: str) -> None:
    """Make the imported package `name` callable."""
    sys.modules[name].__class__ = CallPackage
