"""Methods and tasks that installed packages announce by entry points. One that cannot be taken takes nothing with it:
what else there is stays, and says why when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from typing import Any

Fault = Callable[[str, Any], str | None]
"""fault(name, loaded): what is wrong with it, in words that follow its name; None: nothing"""


def plugins(kind: str, taken: Collection[str], fault: Fault = lambda name, loaded: None) -> tuple[dict, dict[str, str]]:
    """Plugins of a kind ("method": those of the group `kvlens.methods`) by name: what was loaded, and of the others a
    sentence each that says why not. taken: names of the product's own, which no plugin replaces."""
    loaded: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for point in sorted(entry_points(group=f"kvlens.{kind}s"), key=lambda point: point.name):
        wrong = f"has the name of an existing {kind}; rename it" if point.name in {*taken, *loaded} else None
        if wrong is None:
            try:
                found = point.load()
                wrong = fault(point.name, found)
            except Exception as problem:  # whatever a package does that was written for another kvlens
                wrong = f"cannot be loaded ({type(problem).__name__}: {problem}); update its package or uninstall it"
            if wrong is None:
                loaded[point.name] = found
        if wrong:
            refused[point.name] = f"plugin {kind} '{point.name}' ({point.value}) {wrong}."
    return loaded, refused
