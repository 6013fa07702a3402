"""New run: prompt, model, methods and budget; what it will cost; progress of the job in the URL (?job=), a stored race
(?race=)."""

import streamlit as st

from kvlens.app.ui.common import data, nav
from kvlens.app.ui.common.jobview import job_list, job_panel
from kvlens.app.ui.common.racelist import race_list
from kvlens.app.ui.common.readahead import read_ahead
from kvlens.app.ui.common.submit import submit, submit_race
from kvlens.app.ui.common.terms import show_terms
from kvlens.app.ui.race import form, view
from kvlens.app.ui.run import again, preflight, racepreflight
from kvlens.app.ui.run.methodform import method_form, offered_methods
from kvlens.app.ui.run.modelform import model_form
from kvlens.app.ui.run.promptform import prompt_for
from kvlens.app.ui.run.worker import begin_worker, worker_line

REPLAY = "pages/replay.py"
nav.enter()
again.fill_form()
job, race = st.query_params.get("job"), st.query_params.get("race")
if job:
    st.query_params["job"] = (
        job  # after a link from this page to itself the browser shows the address from before it until it is told
    )
    if not view.of_job(job):
        job_panel(job)
elif race:
    st.query_params["race"] = race
    view.draw_stored(race)
if not (job or race) or st.toggle("Set up another run", key=f"another_{job or race}"):
    head = st.container()
    left, right = st.columns(2, gap="large")
    with right:
        st.subheader("Model and method")
        model = model_form(data.models())
    with left:
        st.subheader("Prompt")
        prompt = prompt_for(model)
    with right:
        offered = offered_methods(data.catalogue())
        choice = method_form(offered, model, prompt)
        rivals, choice = form.rivals_form(offered, choice)
    changed = begin_worker((model, choice, rivals, prompt))
    if prompt is not None:
        ready = (
            racepreflight.panel(prompt, choice, rivals, head) if rivals.count else preflight.panel(prompt, choice, head)
        )
        if ready and changed:
            read_ahead(prompt, choice, preflight.prompt_tokens(prompt, choice))
        label = "Run"
        if rivals.count:
            label = f"Race {rivals.count + 1} {'lanes' if rivals.variants else 'methods'}"
        if st.button(label, type="primary", disabled=not ready, icon=":material/play_arrow:"):
            racing = (rivals.methods, rivals.variants)
            begun = submit_race(prompt, choice, *racing) if rivals.count else submit(prompt, choice, REPLAY)
            st.query_params.from_dict({"job": begun})
            st.rerun()
show_terms("New run")
job_list(job)
race_list(race)
worker_line()
