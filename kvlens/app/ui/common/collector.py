"""The collector's work between two runs of a page. Streamlit looks for garbage after every run of a script and of a
fragment, and would go through all that the imported libraries made: a quarter of a second, twice a second while a run
is watched. What was imported is set aside, so that it looks through what sessions made."""

from __future__ import annotations

import atexit
import gc
import sys
import threading

MODULES = 20
"""imported since the last time, from which on it is worth doing again"""


class Collector:
    """Sets aside what stays as long as the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules = 0
        """imported when it was done last"""

    def set_imports_aside(self) -> bool:
        """Return whether it was worth it: after a page's first run, as a rule. Garbage is collected first. Whatever
        lives then is looked at no more: sessions go when nothing refers to them, as ever."""
        with self._lock:
            present = len(sys.modules)
            if present - self._modules < MODULES:
                return False
            if not self._modules:
                atexit.register(gc.unfreeze)  # libraries count at the end what nobody has collected, and say it
            self._modules = present
            gc.collect()
            gc.freeze()
            return True


COLLECTOR = Collector()
"""of this process"""
