"""The methods. To add one: write its file, add its line to BUILT_IN, or announce it by an entry point
`kvlens.methods`."""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvlens.methods.base import Method, MethodInfo, describe, make_parameters

BUILT_IN = {
    "full": "kvlens.methods.full:FullKV",
    "streaming_llm": "kvlens.methods.streaming_llm:StreamingLLM",
    "sekv": "kvlens.methods.sekv.method:SeKV",
    "chess": "kvlens.methods.chess.method:Chess",
    "freekv": "kvlens.methods.freekv.method:FreeKV",
    "sentkv": "kvlens.methods.sentkv.method:SentKVCompress",
    "compresskv": "kvlens.methods.compresskv.method:CompressKV",
    "snapkv": "kvlens.methods.snapkv:SnapKV",
    "keydiff": "kvlens.methods.keydiff:KeyDiff",
    "h2o": "kvlens.methods.h2o:H2O",
    "quest": "kvlens.methods.quest:Quest",
}


class UnknownMethod(ValueError):
    pass


@cache
def registry() -> dict[str, type[Method]]:
    """Name -> class, of the product's methods and of installed plugins. A plugin cannot replace a method of the
    product."""
    methods = {}
    for name, path in BUILT_IN.items():
        module, attribute = path.split(":")
        methods[name] = getattr(importlib.import_module(module), attribute)
    for point in entry_points(group="kvlens.methods"):
        if point.name in methods:
            raise ValueError(
                f"plugin method '{point.name}' ({point.value}) has the name of an existing method; rename it."
            )
        methods[point.name] = point.load()
    return methods


def get(name: str) -> type[Method]:
    """The class of a method. Raises UnknownMethod with the known names."""
    methods = registry()
    if name not in methods:
        raise UnknownMethod(f"unknown method '{name}'; known: {', '.join(methods)}.")
    return methods[name]


def catalogue() -> list[dict[str, Any]]:
    """All methods with their parameters and presets, as plain data (no torch is imported)."""
    return [dataclasses.asdict(describe(method)) for method in registry().values()]


__all__ = ["Method", "MethodInfo", "UnknownMethod", "catalogue", "describe", "get", "make_parameters", "registry"]
