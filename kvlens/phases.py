"""Times the phases of a step on the engine's thread, so that a step's duration can be read as a sum."""

from __future__ import annotations

import time

#: score: the method chooses what to read, and takes note of the step's token; plan: the memory fits the choice into its
#: room and drops or moves what a step leaves behind; copy: copies are begun and their slots named; wait: the engine
#: stands still for a copy; attend: attention over the chosen slots; record: tensors are copied for the record.
PHASES = ("score", "plan", "copy", "wait", "attend", "record")
REST = "rest"
"""all else: the model's own layers, and the choice of the next token"""


class NoClock:
    """Times nothing: a run that is not recorded, or without phases."""

    def enter(self, phase: str) -> str:
        """Begin a phase; return the one that ends."""
        return phase

    def take(self, step_ns: int) -> dict[str, int] | None:
        """Return the microseconds in each phase of a step that took `step_ns`, together its duration, and begin anew.
        None: not timed."""
        return None


class PhaseClock(NoClock):
    """Owns the time spent per phase since the last step ended. Entering a phase costs about half a microsecond."""

    def __init__(self) -> None:
        self._phase, self._since_ns = REST, time.perf_counter_ns()
        self._spent_ns = dict.fromkeys((*PHASES, REST), 0)

    def enter(self, phase: str) -> str:
        previous, now_ns = self._phase, time.perf_counter_ns()
        self._spent_ns[previous] += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns
        return previous

    def take(self, step_ns: int) -> dict[str, int]:
        self.enter(REST)
        spent = {phase: self._spent_ns[phase] // 1000 for phase in PHASES}
        self._spent_ns = dict.fromkeys((*PHASES, REST), 0)
        return spent | {REST: max(0, step_ns // 1000 - sum(spent.values()))}
