"""New run: prompt, model, method and budget; what it will cost; progress of the job in the URL (?job=)."""

import streamlit as st

from kvlens.ui.common import data, nav
from kvlens.ui.common.jobview import job_list, job_panel
from kvlens.ui.common.submit import submit
from kvlens.ui.common.warm import warm
from kvlens.ui.run import preflight
from kvlens.ui.run.methodform import method_form
from kvlens.ui.run.modelform import model_form
from kvlens.ui.run.promptform import prompt_for

nav.enter()
job = st.query_params.get("job")
if job:
    st.query_params["job"] = (
        job  # after a link from this page to itself the browser shows the address from before it until it is told
    )
    job_panel(job)
if not job or st.toggle("Set up another run", key=f"another_{job}"):
    left, right = st.columns(2, gap="large")
    with right:
        st.subheader("Model and method")
        model = model_form(data.models())
    with left:
        st.subheader("Prompt")
        prompt = prompt_for(model)
    with right:
        choice = method_form(data.catalogue(), model, prompt)
    if prompt is not None:
        ready = preflight.panel(prompt, choice)
        if st.button("Run", type="primary", disabled=not ready, icon=":material/play_arrow:"):
            st.query_params["job"] = submit(prompt, choice)
            st.rerun()
job_list(job)
warm.prepare()  # jobs begin on this page
