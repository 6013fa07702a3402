"""The parts of a method that lie beside its class: what draws its view, checks its paper's claims, tells its reasons.

A method that is more than a selection has a folder of its own, named as the method is: there every part is a module of
a fixed name (PARTS). A method without a folder, or without the part, gets what is general. Nothing is imported by
looking a part up before it is asked for; no list names a method.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from kvlens.methods.base import Method

PARTS = {
    "view": "show(reader): draws below the title of the Method page",
    "claims": "claims(engine, prompts, report) -> list[bench.claims.Claim]: the paper's claims on a model at hand",
    "commands": "calibrate, train: functions that become `kvlens calibrate NAME` and `kvlens train NAME`",
    "reasons": "what only this method's words in a trace say of a span (kvlens.lens.own)",
    "rates": "ARMS: the rates of its decisions that `kvlens bench rates` records",
    "gpu": "SETTINGS, HEADLINES, ON_DEVICE: what it says to `kvlens bench gpu` (kvlens.gpu.bench.settings)",
}
"""name of a part -> what its module holds"""


def folder(method: type[Method]) -> str | None:
    """The package of a method that has one of its own, named as the method is. None: it shares one with others."""
    module = method.__module__
    package = module if hasattr(sys.modules.get(module), "__path__") else module.rpartition(".")[0]
    return package if package.rpartition(".")[2] == method.name else None


def has(method: type[Method], name: str) -> bool:
    """Whether the method has a part; nothing is imported."""
    assert name in PARTS, f"{name} is no part of a method: {', '.join(PARTS)}"
    package = folder(method)
    return package is not None and importlib.util.find_spec(f"{package}.{name}") is not None


def part(method: type[Method], name: str) -> ModuleType | None:
    """The module of a part, imported; None: the method has none, and what is general serves it."""
    return importlib.import_module(f"{folder(method)}.{name}") if has(method, name) else None
