"""Lanes on the New run page: a race or a single run while its job goes on (?job=), a race as it was stored (?race=)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import streamlit as st

from kvlens.app.figures.methodmarks import mark
from kvlens.app.ui import race as component
from kvlens.app.ui.common import comparing, data, jobview, places, widgets
from kvlens.app.ui.common.jobs import Job
from kvlens.app.ui.common.racelist import finding
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.race.stored import lines_of
from kvlens.memory.budget import in_words, phrase
from kvlens.methods.naming import titled
from kvlens.runs import races
from kvlens.store.reader import TraceError
from kvlens.text.plaintext import visible

POLL_S = 0.5
AGAIN_S = 3.0
"""lines are sent with every poll for so long, since a browser may not draw each"""
SINGLE = ("run", "pair", "whatif")
"""commands of single runs"""
_LACKING = "race_lacking"


def of_job(job_id: str) -> bool:
    """Draws the lanes of the job in the URL; False where that job has none."""
    job = jobview.manager().get(job_id)
    kind = None if job is None else next(iter(job.argv[3:4]), None)
    if job is None or kind not in ("race", *SINGLE):
        return False
    jobview.leave(job)
    jobview.watched(job)
    st.fragment(_going if kind == "race" else _single, run_every=POLL_S if job.active else None)(job)
    return True


def _single(job: Job) -> None:
    """A single run as a race of one. When it ends, its page opens: the Replay, at the step of loss."""
    with st.container(border=True):
        st.text(visible(job.title))
        if job.note:
            st.caption(widgets.plain(job.note))
        if job.active:
            jobview.progress(job)
        else:
            jobview.outcome(job)
    live_lanes(job)
    if not job.active and jobview.watched(job, ended=True):
        data.forget_runs()
        jobview.leave_later(job)
        st.rerun()


def live_lanes(job: Job) -> None:
    """Draws the lanes of a job that has any."""
    if job.lines:
        start = _first(job) if job.active else 0
        _lanes(job.id, job.lines[0], job.lines[start:], start, not job.active)


def _going(job: Job) -> None:
    with st.container(border=True):
        st.text(visible(job.title))
        if job.active:
            jobview.progress(job)
        elif job.race and job.state == "done":
            _finding(job.race)
        else:
            jobview.ended(job)
    live_lanes(job)
    if job.race:
        _after(job.race)
    if not job.active and jobview.watched(job, ended=True):
        data.forget_runs()
        st.rerun()


def _first(job: Job) -> int:
    """The first line to send: those before it were sent for AGAIN_S seconds, and the browser does not lack them."""
    key, now = f"race_sent_{job.id}", time.monotonic()
    sent: list[tuple[float, int]] = st.session_state.setdefault(key, [])
    start = max((count for when, count in sent if now - when > AGAIN_S), default=0)
    sent[:] = [(when, count) for when, count in sent if count >= start] + [(now, len(job.lines))]
    lacking = st.session_state.pop(_LACKING, None)
    return min(start, lacking) if isinstance(lacking, int) and lacking >= 0 else start


def _gap() -> None:
    """The browser has not all lines: a page that is opened again begins with none."""
    st.session_state[_LACKING] = component.wanted()


def stored(race_id: str) -> None:
    """Draws a race as it was stored."""
    try:
        race = races.read(data.runs_dir(), race_id)
    except TraceError as problem:
        widgets.error(str(problem))
        return
    folder = data.runs_dir()
    lines = lines_of(str(folder), race_id, tuple(data.stamp(lane.uid) if lane.uid else 0 for lane in race.lanes))
    with st.container(border=True):
        limit = phrase(in_words(race.budget))
        st.text(visible(f"Race on {race.model}, {limit}, {race.created[:16].replace('T', ' ')} UTC"))
        _finding(race_id)
    _lanes(race.id, lines[0], lines, 0, True)
    _after(race_id)


def _lanes(race: str, head: str, lines: Sequence[str], start: int, ended: bool) -> None:
    """The component, and where a click on it leads. head: the race's first line."""
    looks = [_look(lane["method"], lane.get("stand_in", "")) for lane in json.loads(head)["lanes"]]
    component.lanes(race, lines, start, looks, ended, _gap, lambda: None)
    clicked = component.opened()
    if ended and isinstance(clicked, Mapping):
        _open(lines, clicked.get("lane"), clicked.get("step"))


def _look(method: str, stand_in: str) -> dict[str, str]:
    look = mark(method)
    return {
        "title": titled(data.titles().get(method, method), stand_in),
        "color": look.color,
        "character": look.character,
    }


def _open(lines: Sequence[str], lane: object, step: object) -> None:
    """The Replay of a lane at a step; nothing for a lane that is not there."""
    if not isinstance(lane, int) or not isinstance(step, int) or step < 0:
        return
    for line in reversed(lines):
        message = json.loads(line)
        if message["phase"] == "lane" and message["lane"] == lane and message["uid"]:
            selection = Selection(run=message["uid"], step=step)
            st.switch_page("pages/replay.py", query_params=places.in_run(message["uid"], selection))


def _finding(race_id: str) -> None:
    """How the race came out, in one line."""
    try:
        sentence = finding(races.read(data.runs_dir(), race_id))
    except TraceError as problem:
        widgets.error(str(problem))
        return
    st.markdown(widgets.plain(sentence))


def _after(race_id: str) -> None:
    """Links that stay: the race itself, and its lanes as a comparison."""
    try:
        race = races.read(data.runs_dir(), race_id)
    except TraceError:
        return  # deleted since
    place = {"race": race_id}
    with st.container(horizontal=True):
        st.page_link("pages/run.py", label="Link to this race", icon=":material/link:", query_params=place)
        if sum(lane.uid is not None for lane in race.lanes) > 1:
            st.page_link(comparing.PAGE, label="Open as comparison", icon=":material/compare:", query_params=place)
