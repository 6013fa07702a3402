"""Lanes on the New run page: a race or a single run while its job goes on (?job=), a race as it was stored (?race=)."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import comparing, data, jobview, widgets
from kvlens.app.ui.common.jobs import Job
from kvlens.app.ui.common.livelanes import draw_lanes, live_lanes
from kvlens.app.ui.common.racelist import finding
from kvlens.app.ui.race.race_lines import changed, lines_of
from kvlens.budget import in_words, phrase
from kvlens.runs import races
from kvlens.store.reader import TraceError
from kvlens.text.plaintext import visible

POLL_S = 0.5
SINGLE = ("run", "pair", "whatif")
"""commands of single runs"""


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
    """A single run as a race of one. When it is stored, its page opens: the Replay, at the step of loss. Effects that
    are still being computed arrive there."""
    jobview.box(job)
    live_lanes(job)
    if (job.stored or not job.active) and jobview.watched(job, ended=True):
        data.forget_runs()
        jobview.leave_later(job)
        st.rerun()


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
        _draw_links(job.race)
    if not job.active and jobview.watched(job, ended=True):
        data.forget_runs()
        st.rerun()


def draw_stored(race_id: str) -> None:
    """Draws a race as it was stored."""
    try:
        race = races.read(data.runs_dir(), race_id)
    except TraceError as problem:
        widgets.error(str(problem))
        return
    folder = data.runs_dir()
    lines = lines_of(str(folder), race_id, changed(folder, race))
    with st.container(border=True):
        limit = phrase(in_words(race.budget))
        st.text(visible(f"Race on {race.model}, {limit}, {race.created[:16].replace('T', ' ')} UTC"))
        _finding(race_id)
    draw_lanes(race.id, lines[0], lines, 0, True)
    _draw_links(race_id)


def _finding(race_id: str) -> None:
    """How the race came out, in one line."""
    try:
        sentence = finding(races.read(data.runs_dir(), race_id))
    except TraceError as problem:
        widgets.error(str(problem))
        return
    st.markdown(widgets.plain(sentence))


def _draw_links(race_id: str) -> None:
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
