"""Runs that repeat a run: their jobs, which the Replay page starts and follows in its own URL (?job=)."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import comparing, data, jobview, widgets
from kvlens.app.ui.common.jobs import Job
from kvlens.app.ui.common.livelanes import live_lanes
from kvlens.app.ui.common.request import TryChoice, pair_command, tip_command, whatif_command
from kvlens.text.plaintext import visible


def start_pair(uid: str) -> str:
    """Queues the forced repeat of a run; returns the job's id."""
    return jobview.manager().submit(
        pair_command(uid, data.runs_dir().resolve()), f"Compare {uid} with full KV, step by step", uid, comparing.PAGE
    )


def start_whatif(uid: str, choice: TryChoice) -> str:
    """Queues the repeat of a run with what was chosen; returns the job's id."""
    title = f"What if, of {uid}: {choice.words()}"
    return jobview.manager().submit(whatif_command(uid, choice, data.runs_dir().resolve()), title, uid)


def start_tip(uid: str) -> str:
    """Queues the search for the budget at which a run's answer tips; returns the job's id."""
    return jobview.manager().submit(tip_command(uid, data.runs_dir().resolve()), f"Where {uid} tips", uid)


def job_of(uid: str) -> Job | None:
    """The job in the URL, if it repeats this run."""
    requested = st.query_params.get("job")
    job = jobview.manager().get(requested) if requested else None
    return job if job is not None and job.about == uid else None


def follow(job: Job) -> None:
    """Progress of a job about the run that is shown, and its lanes. When a comparison is done the Compare page opens
    with it; when a repeat with a held span is done, its outcome is in the URL (?whatif=) and on the page."""
    jobview.leave(job)
    jobview.watched(job)
    st.fragment(_follow, run_every=0.5 if job.active else None)(job)


def _follow(job: Job) -> None:
    if job.active:
        st.text(visible(job.title))
        if job.note:
            st.caption(widgets.plain(job.note))
        jobview.progress(job)
        live_lanes(job)
        return
    data.forget_runs()
    if job.state != "done":
        jobview.outcome(job)
        if jobview.watched(job, ended=True):
            st.rerun()
        return
    if job.then:
        jobview.leave_later(job)
        st.rerun()
    if "job" in st.query_params:
        st.query_params["whatif"] = str(job.uid)
        del st.query_params["job"]
        st.rerun()
