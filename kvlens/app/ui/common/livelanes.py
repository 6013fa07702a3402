"""Lanes of a job while it goes on, and where a click on one leads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import streamlit as st

from kvlens.app.figures.methodmarks import mark
from kvlens.app.ui.common import data, places
from kvlens.app.ui.common import lanes as lanes_component
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.state import Selection
from kvlens.methods.naming import titled

AGAIN_S = 3.0
"""lines are sent with every poll for so long, since a browser may not draw each"""
_LACKING = "race_lacking"


def live_lanes(job: Job) -> None:
    """Draws the lanes of a job that has any."""
    if job.lines:
        start = _first_line(job) if job.active else 0
        draw_lanes(job.id, job.lines[0], job.lines[start:], start, not job.active)


def _first_line(job: Job) -> int:
    """The first line to send: those before it were sent for AGAIN_S seconds, and the browser does not lack them."""
    key, now = f"race_sent_{job.id}", time.monotonic()
    sent: list[tuple[float, int]] = st.session_state.setdefault(key, [])
    start = max((count for when, count in sent if now - when > AGAIN_S), default=0)
    sent[:] = [(when, count) for when, count in sent if count >= start] + [(now, len(job.lines))]
    lacking = st.session_state.pop(_LACKING, None)
    return min(start, lacking) if isinstance(lacking, int) and lacking >= 0 else start


def _gap() -> None:
    """The browser has not all lines: a page that is opened again begins with none."""
    st.session_state[_LACKING] = lanes_component.read_wanted_line()


def draw_lanes(race: str, head: str, lines: Sequence[str], start: int, ended: bool) -> None:
    """Draws lanes; a click on one that has ended opens its Replay. lines: from number `start` on; head: the first."""
    looks = [_look(lane["method"], lane.get("stand_in", "")) for lane in json.loads(head)["lanes"]]
    lanes_component.lanes(race, lines, start, looks, ended, _gap, lambda: None)
    clicked = lanes_component.read_clicked_step()
    if ended and isinstance(clicked, Mapping):
        _open(lines, clicked.get("lane"), clicked.get("step"))


def _look(method: str, stand_in: str) -> dict[str, str]:
    look = mark(method)
    return {"title": titled(data.method_title(method), stand_in), "color": look.color, "character": look.character}


def _open(lines: Sequence[str], lane: object, step: object) -> None:
    """The Replay of a lane at a step; nothing for a lane that is not there."""
    if not isinstance(lane, int) or not isinstance(step, int) or step < 0:
        return
    for line in reversed(lines):
        message = json.loads(line)
        if message["phase"] == "lane" and message["lane"] == lane and message["uid"]:
            selection = Selection(run=message["uid"], step=step)
            st.switch_page("pages/replay.py", query_params=places.in_run(message["uid"], selection))
