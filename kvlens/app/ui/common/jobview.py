"""How jobs look: progress per phase, cancel, what went wrong, the way to the replay."""

from __future__ import annotations

import time

import streamlit as st

from kvlens.app.ui.common import comparing, data, places, retry, widgets
from kvlens.app.ui.common.again import again_link
from kvlens.app.ui.common.jobrecord import FOLDER
from kvlens.app.ui.common.jobs import Job, JobManager
from kvlens.app.ui.common.likely import remaining_s
from kvlens.text.plaintext import visible

SETTLE_S = 0.4
"""until a browser has heard that it need not poll any more"""

_PHASES = {
    "convert": "Making the model ready, once",
    "load": "Loading the model",
    "check": "Checking that the method can keep to its budget",
    "reference": "Making the full-KV reference",
    "prefill": "Prefill",
    "place": "Placing the prompt: spans, summaries, host memory",
    "decode": "Decoding",
    "surprisal": "Computing the surprisal of the prompt's tokens",
    "effect": "Measuring the effect of each missed span",
    "again": "Repeating the run as it was",
    "search": "Looking for what is enough",
    "store": "Storing the trace",
    "trial": "Running trials",
    "ledger": "Repairing one cause after the other",
}
_UNITS = {
    "convert": "MiB",
    "check": "tokens",
    "prefill": "tokens",
    "decode": "steps",
    "reference": "steps",
    "surprisal": "tokens",
    "search": "repeats",
    "effect": "points",
    "ledger": "repeats",
}


@st.cache_resource(show_spinner=False, on_release=JobManager.shutdown)
def manager() -> JobManager:
    """The one queue of this server process, shared by all sessions."""
    return JobManager(folder=data.runs_dir().resolve() / FOLDER)


def job_panel(job_id: str) -> None:
    """The job of the URL. Polls only while the job is active; the page is run again when it ends."""
    job = manager().get(job_id)
    if job is None:
        widgets.error(
            f"Job {job_id[:20]} is not known to this server (it was restarted, or the link is old); finished "
            f"runs are on the Runs page."
        )
        return
    leave(job)
    watched(job)
    st.fragment(_panel, run_every=0.5 if job.active else None)(job)


def leave_later(job: Job) -> None:
    """The job's own page opens when this one is run again. Not at once: a fragment that is polled cannot leave its page
    safely, because a poll that is under way when the page changes brings the old page back, empty."""
    if job.then and (job.state == "done" or job.stored):
        st.session_state[f"leave_{job.id}"] = True


def leave(job: Job) -> None:
    """Goes to the job's own page if `leave_later` said so; polls that were under way have arrived by then."""
    if job.then and st.session_state.pop(f"leave_{job.id}", False):
        time.sleep(SETTLE_S)
        st.switch_page(job.then, query_params=_place(job))


def _place(job: Job) -> dict[str, str]:
    """Where on the job's own page: the new run, or the run it repeats beside it."""
    if job.then == comparing.PAGE and job.about:
        return comparing.at_all_steps(job.about, str(job.uid))
    return places.in_run(str(job.uid or job.stored))


def watched(job: Job, ended: bool = False) -> bool:
    """Notes that this session saw the job at work; with `ended`, tells so once, when it has ended."""
    key = f"watched_{job.id}"
    if ended:
        return bool(st.session_state.pop(key, False))
    if job.active:
        st.session_state[key] = True
    return job.active


def _panel(job: Job) -> None:
    box(job)
    if not job.active and watched(job, ended=True):
        leave_later(job)
        st.rerun()


def box(job: Job) -> None:
    """The job in a box: its title and note, then how far it is, or how it ended."""
    with st.container(border=True):
        st.text(visible(job.title))
        if job.note:
            st.caption(widgets.plain(job.note))
        if job.active:
            progress(job)
        else:
            outcome(job)


def state_word(job: Job) -> str:
    """Return the state in words: a study that was stopped is paused, since it can be gone on with."""
    return "paused" if job.study and job.state == "cancelled" else job.state


def progress(job: Job) -> None:
    """A bar with what it does, and a button to cancel."""
    left_column, right = st.columns([6, 1], vertical_alignment="center")
    waits = job.state == "queued" and manager().reads_ahead()  # kvlens.app.ui.common.readahead
    text = "Reading the prompt" if waits else progress_text(job, manager().position(job.id))
    left_column.progress(_share(job), text=text)
    if right.button("Cancel", key=f"cancel_{job.id}", disabled=job.state == "cancelled", width="stretch"):
        manager().cancel(job.id)
        st.rerun()


def _share(job: Job) -> float:
    return min(1.0, job.done / job.total) if job.total else 0.0


def progress_text(job: Job, tokens_before: int) -> str:
    """Where a job is, in words and numbers."""
    if job.state == "cancelled":
        return "Stopping; what was recorded is being stored"
    if job.state == "queued":
        return f"Waiting for {tokens_before} other run{'s' if tokens_before != 1 else ''}"
    text = _PHASES.get(job.phase, "Starting")
    if job.total:
        text += f" {job.done:,} / {job.total:,} {_UNITS.get(job.phase, '')}".rstrip()
    if job.tokens_per_s is not None:
        text += f" · {job.tokens_per_s:,.1f} tokens/s"
    text = f"{text} · {time.time() - (job.started or time.time()):.0f} s"
    left_s = None if job.phase_began is None else _left_s(job, time.time() - job.phase_began)
    return text if left_s is None else f"{text}, about {left_s:.0f} s left"


def _left_s(job: Job, elapsed_s: float) -> float | None:
    """Seconds until the run is stored, by what its phases took before and by how far this one is."""
    return remaining_s(job.likely, job.phase, job.done, job.total, elapsed_s, job.lost)


def outcome(job: Job) -> None:
    """How it ended, and the ways to look at what came out."""
    ended(job)
    if job.uid:
        links(job.uid)


def ended(job: Job) -> None:
    """How it ended."""
    took = f" after {job.ended - job.started:.1f} s" if job.ended and job.started else ""
    if job.state == "failed":
        widgets.error(retry.spoken(job), job.log)
        if options := retry.advice(job):
            _offer(job, options)
    elif job.state == "cancelled":
        st.warning(f"{state_word(job).capitalize()}{took}.")
    else:
        st.success(f"Done{took}.")


def _offer(job: Job, options: dict[str, str]) -> None:
    """The run once more, with what its refusal says would do."""
    words = retry.label(options)
    if st.button(words, key=f"again_{job.id}", icon=":material/replay:", type="primary"):
        title = f"{job.title} · {words[0].lower()}{words[1:]}"
        st.query_params["job"] = manager().submit(retry.again(job.argv, options), title, job.about, job.then)
        st.rerun()


def links(uid: str) -> None:
    """Ways to look at a run."""
    place = places.in_run(uid)
    with st.container(horizontal=True):
        st.page_link("pages/replay.py", label="Open in Replay", icon=":material/play_circle:", query_params=place)
        st.page_link("pages/heads.py", label="Open in Heads", icon=":material/grid_on:", query_params=place)
        st.page_link("pages/method.py", label="Open in Method", icon=":material/schema:", query_params=place)
        comparing.links(uid)
        again_link(uid)


def job_list(shown: str | None) -> None:
    """The other jobs of this server: state and a link each."""
    rest = [job for job in manager().jobs() if job.id != shown]
    if not rest:
        return
    st.markdown("##### Jobs of this server")
    for job in rest:
        left_column, middle, right = st.columns([7, 2, 2], vertical_alignment="center")
        left_column.text(visible(job.title))
        middle.text(state_word(job) if job.state != "running" else progress_text(job, 0))
        with right:
            if job.study:
                place = {"study": job.study, "job": job.id}
                st.page_link("pages/study.py", label="Study", icon=":material/table_chart:", query_params=place)
            elif job.uid and not job.active:
                st.page_link(
                    "pages/replay.py",
                    label="Replay",
                    icon=":material/play_circle:",
                    query_params=places.in_run(job.uid),
                )
            else:
                st.page_link("pages/run.py", label="Show", icon=":material/visibility:", query_params={"job": job.id})
