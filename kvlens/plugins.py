"""Methods and tasks that installed packages announce by entry points. A package that cannot be loaded harms no other:
whatever it raises becomes one sentence, and whatever it prints goes to stderr, since stdout may carry JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvlens import hangs, interrupts
from kvlens.text.plaintext import visible
from kvlens.text.units import time_limit

LONGEST_NAME = 80
"""characters that a sentence shows of a name that a package gives"""
CODE = "plugin_refused"
"""what every sentence about a refused plugin begins with"""
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
            found, wrong = _load(point, fault)
            if wrong is None:
                loaded[point.name] = found
        if wrong:
            name, value = (visible(text[:LONGEST_NAME]).replace("\n", " ") for text in (point.name, point.value))
            refused[name] = f"{CODE}: plugin {kind} '{name}' ({value}) {wrong}."
    return loaded, refused


def _load(point: EntryPoint, fault: Fault) -> tuple[Any, str | None]:
    """Return what an entry point names, and what is wrong with it. Only a person's Ctrl-C gets through. A module that
    does not end is left alone in its thread."""
    seconds = hangs.limit(hangs.IMPORT_VARIABLE)

    def load() -> tuple[Any, str | None]:
        found = point.load()
        return found, fault(point.name, found)

    with interrupts.watched(), redirect_stdout(sys.stderr):
        try:
            return hangs.within(seconds, point.name, load)
        except hangs.Hang:
            words = f"does not end within {time_limit(seconds)} ({hangs.IMPORT_VARIABLE} sets the limit)"
            return None, f"{words}; update its package or uninstall it"
        except BaseException as problem:
            if isinstance(problem, KeyboardInterrupt) and interrupts.by_person():
                raise
            said = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
            return None, f"cannot be loaded ({said}); update its package or uninstall it"
