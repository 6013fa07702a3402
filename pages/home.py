"""The first page: what kvlens is, a loss and its repair as a moving picture, the runs there are, recorded losses."""

import streamlit as st

from kvlens.app.ui.common import data, nav
from kvlens.app.ui.common.foresightview import foreseeing
from kvlens.app.ui.common.racelist import race_list
from kvlens.app.ui.common.submit import sample_buttons
from kvlens.app.ui.common.terms import show_terms
from kvlens.app.ui.home.causes import why_lost
from kvlens.app.ui.home.gallery import shelf
from kvlens.app.ui.home.hero import hero
from kvlens.app.ui.home.runlist import run_list
from kvlens.app.ui.home.ticked_runs import draw_ticked

nav.enter()
hero(sample_buttons)
table = data.runs()
if not table.empty:
    st.subheader("Runs", anchor=False)
    show_terms("Runs")
    ticked = run_list(table)
    if ticked:
        draw_ticked(table, ticked)
    else:
        st.caption(
            "A click on a run opens it; tick runs to name, tag, compare or delete them. Newest first; bytes are "
            "decimal (1 MB = 10⁶ bytes). The peak counts slot tables as well, so FullKV's peak is slightly above full "
            "KV. Duration: prefill, decoding and storing, without loading the model. The output of a forced run is "
            "what it was fed, full KV's tokens."
        )
        why_lost(table)
        foreseeing([str(uid) for uid in table["uid"]], "kvlens-runs")
    race_list()
shelf()
if table.empty:
    st.page_link(
        "pages/run.py", label="Or set up your own run: your prompt, any method and budget", icon=":material/tune:"
    )
    st.page_link(
        "pages/benchmarks.py",
        label="Or start from a lost answer: what each method finds, by depth and length",
        icon=":material/grid_on:",
    )
