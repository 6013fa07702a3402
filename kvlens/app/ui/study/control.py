"""Buttons of a stored study: pause it, go on with it, add budgets and values to it."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import data
from kvlens.app.ui.common.jobview import manager
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.study.request import extend_command, resume_command
from kvlens.studies.table import Results


def controls(results: Results, running: bool) -> None:
    """Draw what can be done with the study now. running: some process carries it out."""
    info = results.info
    title, runs_dir = f"Study {info.plan.name or info.id}", data.runs_dir().resolve()
    with st.container(horizontal=True):  # one place in either case, so that nothing below it moves
        if running:
            job = next((job for job in manager().jobs() if job.active and job.study == info.id), None)
            if job is not None and st.button("Pause", key="study_pause", icon=":material/pause:"):
                manager().cancel(job.id)
                st.rerun()
            return
        if results.ended < results.planned and st.button("Go on", key="study_resume", icon=":material/play_arrow:"):
            _submit(resume_command(info.id, runs_dir), title)
        with st.popover("Extend", icon=":material/add:", key=f"study_extend_{info.id}"):
            budgets = st.text_input(
                "More budgets", key="study_more_budgets", help="Shares of full KV, separated by commas."
            )
            values = {
                f"{method}.{name}": st.text_input(plain(f"More values of {method}.{name}"), key=f"more_{method}.{name}")
                for method, grid in info.plan.values.items()
                for name in grid
            }
            values = {target: text for target, text in values.items() if text.strip()}
            has_more = bool(budgets.strip() or values)
            if st.button("Run them too", key="study_run_more", type="primary", disabled=not has_more):
                _submit(extend_command(info.id, budgets, values, runs_dir), title)


def _submit(argv: list[str], title: str) -> None:
    st.query_params["job"] = manager().submit(argv, title)
    st.rerun()
