"""Runs: what there is to look at; with no runs, what kvlens does and one button to begin."""

import streamlit as st

from kvlens.app.ui.common import data, nav
from kvlens.app.ui.common.racelist import race_list
from kvlens.app.ui.common.submit import sample_buttons
from kvlens.app.ui.home.causes import why_lost
from kvlens.app.ui.home.chosen import chosen
from kvlens.app.ui.home.gallery import shelf
from kvlens.app.ui.home.picture import picture
from kvlens.app.ui.home.runlist import run_list

nav.enter()
st.subheader("Runs")
table = data.runs()
if table.empty:
    st.text(
        "kvlens runs a language model under a KV-cache method and logs every decision: per step, layer and head.\n"
        "Then it replays the generation token by token: what the method kept, what it read, what it moved and "
        "what that cost."
    )
    sample_buttons()
    shelf(folded=False)
    st.page_link(
        "pages/run.py", label="Or set up your own run: your prompt, any method and budget", icon=":material/tune:"
    )
    st.page_link(
        "pages/benchmarks.py",
        label="Or start from a lost answer: what each method finds, by depth and length",
        icon=":material/grid_on:",
    )
    picture()
else:
    ticked = run_list(table)
    if ticked:
        chosen(table, ticked)
    else:
        st.caption(
            "A click on a run opens it; tick runs to name, tag, compare or delete them. Newest first; bytes are "
            "decimal (1 MB = 10⁶ bytes). The peak counts slot tables as well, so FullKV's lies a little above full "
            "KV. Duration: prefill, decoding and storing, without loading the model. The output of a forced run is "
            "what it was fed, full KV's tokens."
        )
        why_lost(table)
        sample_buttons()
    race_list()
    shelf(folded=True)
