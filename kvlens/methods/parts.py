"""Parts of a method that serve another room than its algorithm: its view, its paper's claims, its reasons.

A part of a built-in method is a module named as the method, in the package of the room it serves, for example
`kvlens.lens.methods.NAME`. A plugin brings its parts beside its class: modules of fixed names (PARTS) in a package
named as the method. No list names a method, and looking a part up imports nothing else. A method without the part gets
the general one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from kvlens.methods.base import Method
from kvlens.methods.composition import innermost

PARTS = {
    "view": "show(reader): draws below the title of the Method page",
    "claims": "STATEMENTS: the paper's claims as comparisons; claims(engine, prompts, report) -> list[Claim]: others",
    "commands": "calibrate, train: functions that become `kvlens calibrate NAME` and `kvlens train NAME`",
    "reasons": "reasons that only this method's journal holds (kvlens.lens.method_reasons)",
    "protocol": "PROTOCOL: how its paper measures quality (kvlens.studies.protocols)",
    "rates": "ARMS: the rates of its decisions that `kvlens bench rates` records",
    "gpu": "SETTINGS, HEADLINES, ON_DEVICE: its settings for `kvlens bench gpu`",
}
"""name of a part -> content of its module"""
BUILT_IN = "kvlens.methods."


def module_of(method: type[Method], name: str, room: str) -> str | None:
    """Return the full name of the module of a part, whether or not it exists; None for a plugin without a package. A
    composed method has the parts of its innermost method.

    room: the package that holds this part of the built-in methods."""
    assert name in PARTS, f"{name} is no part of a method: {', '.join(PARTS)}"
    method = innermost(method)
    home = method.__module__
    if home.startswith(BUILT_IN):
        return f"{room}.{method.name}"
    package = home if hasattr(sys.modules.get(home), "__path__") else home.rpartition(".")[0]
    return f"{package}.{name}" if package.rpartition(".")[2] == method.name else None


def has(method: type[Method], name: str, room: str) -> bool:
    """Return whether the method has a part, without importing the part."""
    module = module_of(method, name, room)
    return module is not None and importlib.util.find_spec(module) is not None


def part(method: type[Method], name: str, room: str) -> ModuleType | None:
    """Import and return the module of a part; None if the method has none."""
    return importlib.import_module(str(module_of(method, name, room))) if has(method, name, room) else None
