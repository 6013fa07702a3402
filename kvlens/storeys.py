"""The storeys above the core. The core imports nothing of them; it looks for modules that they offer by a fixed name
(`commands` for the command line, `tasks` for benchmark files). An installation may lack a storey, or the packages that
a storey needs."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

STOREYS = ("kvlens.lab", "kvlens.app")
EXTRAS = {
    "streamlit": "app",
    "starlette": "app",
    "plotly": "app",
    "umap": "app",
    "math_verify": "lab",
    "triton": "gpu",
    "ray": "ray",
}
"""package -> the extra of kvlens that installs it"""


class MissingExtra(ValueError):
    """A command needs a package that is not installed. `extra` installs it."""

    code = "missing_extra"

    def __init__(self, package: str) -> None:
        self.package, self.extra = package, EXTRAS[package]
        super().__init__(f"{self.code}: {package} is not installed; run: pip install 'kvlens[{self.extra}]'")


def offered(name: str) -> list[ModuleType]:
    """Import and return the module `name` of every storey that has one, the lab's before the app's."""
    modules = [f"{storey}.{name}" for storey in STOREYS if importlib.util.find_spec(storey) is not None]
    return [importlib.import_module(module) for module in modules if importlib.util.find_spec(module) is not None]


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Return the extra that installs the module which `error` names; None if no extra does."""
    package = (error.name or "").partition(".")[0]
    return MissingExtra(package) if package in EXTRAS else None
