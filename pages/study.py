"""Study: prompts under methods, values of their parameters and budgets; a stored study (?study=) or a job (?job=)."""

import streamlit as st

from kvlens.app.ui.common import nav
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.jobview import job_panel, manager
from kvlens.app.ui.common.terms import show_terms
from kvlens.app.ui.study.form import study_form
from kvlens.app.ui.study.listed import study_list
from kvlens.app.ui.study.view import show_study


def _show_when_there(job: Job) -> None:
    """Draw the page anew as soon as the job's study is stored."""
    if job.study:
        st.rerun()


nav.enter()
show_terms("Study")
study, job_id = st.query_params.get("study"), st.query_params.get("job")
job = None if job_id is None else manager().get(job_id)
if job is not None and job.study:
    study = job.study
    st.query_params.from_dict({"study": study, "job": job.id})
# Each part has its place on the page, whether it is drawn or not: what moved up would be seen twice until a run ends.
job_place, study_place = st.container(), st.container()
with job_place:
    if job_id is not None and (job is None or job.active or job.state == "failed"):
        job_panel(job_id)
with study_place:
    if study:
        show_study(study)
    elif job is not None and job.active:
        st.fragment(_show_when_there, run_every=1.0)(job)
if not (study or job) or st.toggle("Set up another study", key=f"another_{study or job_id}"):
    new_job = study_form()
    if new_job is not None:
        st.query_params.from_dict({"job": new_job})
        st.rerun()
study_list(study)
