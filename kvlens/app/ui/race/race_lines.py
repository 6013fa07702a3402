"""The lines of a race that was stored, made from the traces of its lanes as the race said them while it went on."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from kvlens.runs import races
from kvlens.runs.frames import of_run
from kvlens.runs.races import RaceInfo, begun_line, frame_line, lane_line, maps_line
from kvlens.store.reader import TraceError, TraceReader, stamp


def changed(folder: Path, race: RaceInfo) -> tuple[int, ...]:
    """Return when the race's own file and each lane's trace were last changed, ns; 0 where there is none."""
    path = folder / races.FOLDER / f"{race.id}.json"
    written = path.stat().st_mtime_ns if path.is_file() else 0
    return written, *(stamp(folder, lane.uid) if lane.uid else 0 for lane in race.lanes)


@st.cache_data(max_entries=8, show_spinner="Reading the lanes\u2026")
def lines_of(folder: str, race_id: str, changed: tuple[int, ...]) -> list[str]:
    """Return a stored race's lines. A lane whose run cannot be read says so. Raises TraceError.

    changed: what the function `changed` returns; lines are kept as long as it stays the same."""
    race = races.read(Path(folder), race_id)
    lines = [begun_line(race)]
    for number, lane in enumerate(race.lanes):
        sentences = []
        if lane.uid is not None:
            try:
                with TraceReader.open(Path(folder), lane.uid) as reader:
                    sentences = [(frame_line(frame), maps_line(maps)) for frame, maps in of_run(number, reader)]
            except TraceError as problem:
                lane = lane.model_copy(update={"message": str(problem), "uid": None})
        lines += [line for pair in sentences for line in pair]
        lines.append(lane_line(number, lane))
    return lines
