"""Runs that repeat a run: their jobs, which the Replay page starts and follows in its own URL (?job=)."""

from __future__ import annotations

import streamlit as st

from kvlens.lens.lines import ranges_in_words
from kvlens.text.plaintext import visible
from kvlens.ui.common import comparing, data, jobview
from kvlens.ui.common.jobs import Job
from kvlens.ui.common.request import HoldChoice, pair_command, whatif_command


def start_pair(uid: str) -> str:
    """Queues the forced repeat of a run; returns the job's id."""
    return jobview.manager().submit(
        pair_command(uid, data.runs_dir().resolve()), f"Compare {uid} with full KV, step by step", uid, comparing.PAGE
    )


def start_whatif(uid: str, hold: HoldChoice) -> str:
    """Queues the repeat of a run with spans held resident."""
    where = "all layers" if hold.layers == "all" else f"layer {hold.layers}"
    heads = "all KV heads" if hold.heads == "all" else f"KV head {hold.heads}"
    what = "find the smallest set of heads that bring it back" if hold.search else f"hold it for {where}, {heads}"
    names = [f"{'span' if len(hold.spans) == 1 else 'spans'} {', '.join(map(str, hold.spans))}"] if hold.spans else []
    names += [ranges_in_words(hold.tokens)] if hold.tokens else []
    title = f"What if {' and '.join(names)} of {uid} had been there from step {hold.from_step} on: {what}"
    return jobview.manager().submit(whatif_command(uid, hold, data.runs_dir().resolve()), title, uid)


def job_of(uid: str) -> Job | None:
    """The job in the URL, if it repeats this run."""
    asked = st.query_params.get("job")
    job = jobview.manager().get(asked) if asked else None
    return job if job is not None and job.about == uid else None


def follow(job: Job) -> None:
    """Progress of a job about the run that is shown. When a comparison is done the Compare page opens with it; when a
    repeat with a held span is done, its outcome is in the URL (?whatif=) and on the page."""
    jobview.leave(job)
    jobview.watched(job)
    st.fragment(_follow, run_every=0.5 if job.active else None)(job)


def _follow(job: Job) -> None:
    if job.active:
        st.text(visible(job.title))
        jobview.progress(job)
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
