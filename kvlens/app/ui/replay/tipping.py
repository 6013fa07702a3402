"""Where the answer tips: a button that searches, and what the stored repeats at other budgets tell."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import data, lensjobs, places
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.widgets import plain
from kvlens.lens.storedtips import stored_tip
from kvlens.lens.tries import Try


def tipping_point(reader: TraceReader, outcomes: list[Try], busy: bool) -> None:
    """Draw the button and the sentence. outcomes: what was tried on the run."""
    tip = stored_tip(reader, outcomes, data.open_run)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button(
            "Where does it tip?",
            icon=":material/balance:",
            key="find_tip",
            disabled=busy or bool(reader.meta.hold or reader.meta.drop),
            help="Repeats the run at other budgets, halving the range, until a lost and a right one are neighbours. "
            "Every repeat is kept.",
        ):
            st.query_params["job"] = lensjobs.start_tip(reader.uid)
            st.rerun()
        if len(tip.probes) > 1:
            st.markdown(plain(tip.sentence), width="content")
            for probe in (tip.lost, tip.right):
                if probe is not None and probe.uid != reader.uid:
                    words = f"{'Right' if probe.right else 'Lost'} at {tip.words(probe.value)}"
                    place = places.in_run(probe.uid)
                    st.page_link("pages/replay.py", label=plain(words), query_params=place)
