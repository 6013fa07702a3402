"""Lanes that an audience watches: those of a race, and those of a single run, which is a race of one beside full KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens import methods, tasks
from kvlens.methods.naming import stand_in
from kvlens.runs.frames import Frame, Maps, of_run
from kvlens.runs.preparing import Plan, Prepared
from kvlens.runs.races import EXPLAINING, Lane, RaceInfo
from kvlens.runs.request import AUTO, RunRequest
from kvlens.runs.watching import Audience, Watched
from kvlens.store.reader import TraceReader
from kvlens.store.runinfo import now
from kvlens.text.prompts import PromptText

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.runs.storing import Stored


class LaneLog:
    """The lanes as they are now. It tells the audience of each change."""

    def __init__(
        self, info: RaceInfo, source: PromptText, audience: Audience, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """on_change: called after a lane has changed, before the audience hears of the lane."""
        self.info, self._source, self._audience, self._on_change = info, source, audience, on_change

    def frame(self, frame: Frame) -> None:
        """Note a step of a lane."""
        lane = self.info.lanes[frame["lane"]]
        if lane.lost is None and frame["agrees"] is False:
            lane.lost = frame["step"]
        self._audience.frame(frame)

    def maps(self, maps: Maps) -> None:
        """Pass on the maps of a step."""
        self._audience.maps(maps)

    def change(self, number: int, fields: Mapping[str, Any]) -> None:
        """Set fields of a lane. Where the answer is known, judge the output of a lane that explains or is completed; in
        any other state a lane has no verdict."""
        lane = self.info.lanes[number]
        for name, value in fields.items():
            setattr(lane, name, value)
        whole = lane.state in (EXPLAINING, "completed")
        lane.right = (
            tasks.judged(self._source.task, self.info.answer, lane.text, self._source.answers)
            if whole and self.info.answer
            else None
        )
        self._on_change()
        self._audience.lane(number, lane)

    def show_stored(self, number: int, runs_dir: Path, uid: str, with_frames: bool) -> None:
        """Show a stored run as an ended lane; with_frames: also its steps, which the audience has not seen."""
        with TraceReader.open(runs_dir, uid) as reader:
            fields = {"uid": uid, "state": "completed", "text": reader.meta.output_text or ""}
            frames = list(of_run(number, reader)) if with_frames else []
        for frame, maps in frames:
            self.frame(frame)
            self.maps(maps)
        self.change(number, fields)


def sizes_of_lanes(prepared: Prepared, max_new: int) -> dict[str, int]:
    """Return `RaceInfo.sizes` of runs on a prompt."""
    shape, prompt = prepared.engine.loaded.shape, prepared.prompt
    steps = len(prompt.asked) + max_new
    return {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "full_kv_bytes": shape.full_kv_bytes(len(prompt.ids) + steps),
        "prompt_tokens": len(prompt.ids),
        "asked": len(prompt.asked),
        "steps": steps,
    }


class SingleRun:
    """A single run as a race of one: full KV in lane 0 where the run is compared with full KV, then the run. Nothing of
    it is stored but the runs themselves."""

    def __init__(self, audience: Audience, prepared: Prepared, request: RunRequest, planned: Plan) -> None:
        """Tell the audience which lanes there are."""
        source, tokens = prepared.prompt.source, len(prepared.prompt.ids)
        lane = Lane(
            method=request.method,
            preset=request.preset,
            stand_in=stand_in(request.method, dataclasses.asdict(planned.params)),
        )
        compared = request.against or request.forced_reference
        lanes = [Lane(method=methods.REFERENCE), lane] if compared else [lane]
        lanes[0].state = "prefill"
        info = RaceInfo(
            id="single",
            created=now(),
            model=request.model,
            budget=request.budget or AUTO,
            max_new=request.max_new,
            answer=source.answer,
            sizes=sizes_of_lanes(prepared, request.max_new),
            lanes=lanes,
        )
        self._log, self._number = LaneLog(info, source, audience), len(lanes) - 1
        self.full_kv = Watched(0, tokens, _call, self._log)
        """watches the full-KV run, where it is made now"""
        self.run = Watched(self._number, tokens, _call, self._log)
        """watches the run"""
        audience.begun(info)
        for number, each in enumerate(lanes):
            audience.lane(number, each)

    def show_reference(self, runs_dir: Path, reference: Reference) -> None:
        """Full KV has ended, or was stored before."""
        self._log.show_stored(0, runs_dir, reference.uid, with_frames=not self.full_kv.made)

    def show_stored(self, stored: Stored) -> None:
        """The run was stored; its effects are being computed."""
        self._log.change(self._number, {"uid": stored.uid, "text": stored.text, "stored": True})

    def end(self, stored: Stored) -> None:
        """The run was stored."""
        self._log.change(self._number, {"uid": stored.uid, "state": stored.status, "text": stored.text})


def _call(hear: Callable[..., None], *values: Any) -> None:
    hear(*values)
