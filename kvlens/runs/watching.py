"""Who watches a race or a single run, and what is shown of a lane's run while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kvlens.runs.frames import Frame, Maps, frame_of, maps_of, sketch_of
from kvlens.runs.races import EXPLAINING, Lane, RaceInfo

if TYPE_CHECKING:
    import numpy as np

    from kvlens.recording.facts import Seen
    from kvlens.records import StepRecord


IN_FLIGHT_S = 5.0
"""seconds for which the last steps of a lane may stay in memory while other lanes decode"""


class Audience(Protocol):
    """Who watches a race, called on the thread that carries it out; or a single run, called also on its recorder's."""

    def report(self, phase: str, number: int, total: int) -> None:
        """How far the race is: load, prefill, reference, then decode in steps of all lanes together."""

    def begun(self, race: RaceInfo) -> None:
        """All lanes are known."""

    def lane(self, number: int, lane: Lane) -> None:
        """A lane has begun, was refused, or has ended."""

    def frame(self, frame: Frame) -> None:
        """A step of a lane has ended, see kvlens.runs.frames."""

    def maps(self, maps: Maps) -> None:
        """A step of a lane was sketched, or measured: then once more, which counts."""


class LaneListener(Protocol):
    """What hears of a lane: kvlens.runs.lanes.LaneLog."""

    def frame(self, frame: Frame) -> None: ...
    def maps(self, maps: Maps) -> None: ...
    def change(self, number: int, mapping: dict[str, Any]) -> None: ...


class Watched:
    """Makes frames and maps of a lane's steps (kvlens.runs.storing.Watcher), and tells them."""

    def __init__(self, number: int, prompt_tokens: int, tell: Callable[..., None], lanes: LaneListener) -> None:
        """tell(hear, *values): calls `hear(*values)`, on the thread that the lanes belong to."""
        self._number, self._prompt, self._tell, self._lanes = number, prompt_tokens, tell, lanes
        self.made = False
        """whether there was anything to see: a run that is made now"""
        self.ended = False
        """the output is whole"""
        self._ended_s = 0.0
        self._made_steps = self._measured_steps = 0

    def begun(self, uid: str) -> None:
        self._tell(self._lanes.change, self._number, {"uid": uid, "state": "running"})

    def note_step(self, visited: Seen) -> None:
        self.made = True
        self._made_steps += 1
        self._tell(self._lanes.frame, frame_of(self._number, visited))

    def decoded(self, text: str) -> None:
        self.ended, self._ended_s = True, time.monotonic()
        self._tell(self._lanes.change, self._number, {"text": text, "state": EXPLAINING})

    def may_wait(self) -> bool:
        """Return True if a run whose output is whole may stand still for others: all its steps are measured, or the
        last ones are in flight for less than IN_FLIGHT_S."""
        return self._measured_steps == self._made_steps or time.monotonic() - self._ended_s < IN_FLIGHT_S

    def sketched(self, step: int, attended: np.ndarray, coverage: np.ndarray | None) -> None:
        maps = sketch_of(self._number, step, attended, coverage, self._prompt + step)
        self._tell(self._lanes.maps, maps)

    def step(self, record: StepRecord) -> None:
        self._measured_steps += 1
        maps = maps_of(self._number, record, self._prompt + record.step)
        self._tell(self._lanes.maps, maps)
