"""Less work for Python's garbage collector. Streamlit calls it after every run of a script or fragment, and it went
through the objects of all imported libraries: a quarter of a second, twice a second while a run is watched. These
objects are frozen, so the collector goes through the objects of sessions alone."""

from __future__ import annotations

import atexit
import gc
import sys
import threading

MODULES = 20
"""imported since the last freeze, from which on another one is made"""


class Collector:
    """Freezes the objects of imported libraries. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules = 0
        """imported at the last freeze"""

    def freeze_imports(self) -> bool:
        """Freeze all objects that live now if MODULES modules were imported since the last freeze: after a page's first
        run, as a rule. Return whether that was so. Garbage is collected first. A frozen object is still freed when
        nothing refers to it; the collector no longer finds it in a cycle."""
        with self._lock:
            present = len(sys.modules)
            if present - self._modules < MODULES:
                return False
            if not self._modules:
                atexit.register(gc.unfreeze)  # libraries report objects that are frozen at the end as leaks
            self._modules = present
            gc.collect()
            gc.freeze()
            return True


COLLECTOR = Collector()
"""of this process"""
