"""What only a run's own method knows of its reasons: its part `reasons` (kvlens.methods.parts).

The part may have any of these functions; without one, or without the method, what is general holds.

- `told(facts) -> (kind, sentence) | None`: the reason, from the method's journal; None: not told there.
- `evicted(facts) -> str`: the rule by which a span was evicted whole, without a recorded ranking.
- `waits(config) -> bool`: with these parameters every selection is moved after its step's attention.
- `unmoved(facts) -> str`: why a head that reuses the step before's selection was not corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvlens.methods.naming import installed
from kvlens.methods.parts import part
from kvlens.store.reader import TraceReader

Told = tuple[str, str]
"""(kind of kvlens.lens.reasons.KINDS, sentence without its full stop)"""


@dataclass(frozen=True)
class MethodReasons:
    """A method's part `reasons`, or what stands in for it."""

    module: ModuleType | None

    @classmethod
    def load(cls, reader: TraceReader) -> MethodReasons:
        """Of the run's method; nothing of one that is not installed here."""
        method = installed(str(reader.meta.method))
        return cls(None if method is None else part(method, "reasons", "kvlens.lens.methods"))

    def ask(self, name: str, *about: Any) -> Any | None:
        """What its function of that name says; None: it has none, or that says nothing."""
        function = getattr(self.module, name, None)
        return None if function is None else function(*about)


def read_newest(reader: TraceReader, name: str, step: int, layer: int | None = None) -> tuple[np.ndarray | None, int]:
    """The vector of the journal that was noted last up to a step (of a layer), and when; (None, -1) where there is
    none."""
    frame = reader.journal(name)
    frame = frame[frame["step"] <= step]
    if layer is not None:
        frame = frame[frame["layer"] == layer]
    if frame.empty:
        return None, -1
    last = frame.sort_values("step").iloc[-1]
    return np.asarray(last["values"], np.float64), int(last["step"])
