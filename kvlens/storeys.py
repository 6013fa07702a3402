"""The storeys above the core. The core imports nothing of them; it looks for modules that they offer by a fixed name
(`commands` for the command line, `tasks` for benchmark files). An installation may lack a storey."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

STOREYS = ("kvlens.lab", "kvlens.app")


def offered(name: str) -> list[ModuleType]:
    """Import and return the module `name` of every storey that has one, the lab's before the app's."""
    modules = [f"{storey}.{name}" for storey in STOREYS if importlib.util.find_spec(storey) is not None]
    return [importlib.import_module(module) for module in modules if importlib.util.find_spec(module) is not None]
