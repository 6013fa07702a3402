"""The lanes of a race before they run: what each is asked to do, and which are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from kvlens import methods
from kvlens.methods.faults import stray
from kvlens.methods.naming import stand_in
from kvlens.refusal import Refusal
from kvlens.runs.preparing import Prepared, plan
from kvlens.runs.races import REFUSED, Lane, RaceRequest
from kvlens.runs.request import RunRequest

Seen = TypeVar("Seen")


class Lineup:
    """Owns the lanes and their requests, in one order. Lane 0 is full KV's."""

    def __init__(self, request: RaceRequest) -> None:
        self._request = request
        self._configs: dict[int, dict[str, Any]] = {}
        """lane -> the parameters that it runs with"""
        self.requests = [request.reference]
        self.lanes = [Lane(method=methods.REFERENCE)]
        for entrant, (lane_request, note) in zip(request.entrants, request.lanes(), strict=True):
            self.requests.append(lane_request)
            differs = request.difference(entrant)
            self.lanes.append(Lane(method=lane_request.method, preset=lane_request.preset, differs=differs, note=note))

    def entered(self) -> list[int]:
        """Return the lanes of methods that were not refused."""
        return [number for number, lane in enumerate(self.lanes) if number and lane.state != REFUSED]

    def refuse(self, look: Callable[[RunRequest], Seen]) -> list[Seen]:
        """Look at every lane that may still run, and note the reason where `look` raises ValueError. Return what it
        returned of the others. Raises ValueError where no lane is left."""
        returned: list[Seen] = []
        for number in self.entered():
            lane = self.lanes[number]
            try:
                returned.append(look(self.requests[number]))
            except BaseException as error:
                if not isinstance(stray(lane.method, error), ValueError):
                    raise
                lane.state, lane.message = REFUSED, str(stray(lane.method, error))
        if not self.entered():
            raise ValueError("; ".join(str(lane.message).rstrip(".") for lane in self.lanes[1:]) + ".")
        return returned

    def plan(self, request: RunRequest, prepared: Prepared) -> None:
        """Plan a lane's run, and note what its parameters are. Raises as kvlens.runs.preparing.plan, and Refusal
        `lane_twice` for a lane that would run as an earlier one does."""
        number = self.requests.index(request)
        lane, planned = self.lanes[number], plan(request, prepared)
        planned_words, config = planned.chosen.said, dataclasses.asdict(planned.params)
        for earlier, earlier_config in self._configs.items():
            if self.lanes[earlier].method == lane.method and earlier_config == config:
                sentence = f"this lane runs {lane.method} with the parameters of lane {earlier}: change one or drop it."
                raise Refusal(sentence, code="lane_twice", method=lane.method, lane=earlier)
        self._configs[number] = config
        lane.stand_in = stand_in(request.method, config)
        lane.differs = self._request.difference(self._request.entrants[number - 1], config)
        lane.note = " ".join(sentence for sentence in (lane.note, planned_words) if sentence) or None
