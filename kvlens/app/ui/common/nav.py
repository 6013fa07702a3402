"""The pages and how they are reached."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from streamlit.navigation.page import Page

from kvlens.app.ui.common import chart, session
from kvlens.app.ui.common.door import refuse_session

#: The tab's icon comes from this package: a material icon would be fetched from the network.
ICON = str(Path(__file__).with_name("icon.svg"))
#: Less empty room above and beside a page, smaller figures in the verdict's box; no content from data.
STYLE = (
    "<style>.stMainBlockContainer { padding: 3.9rem 2.4rem 3rem; } .stVerticalBlock { gap: .65rem; } "
    '.st-key-tried [data-testid="stMetricValue"] { font-size: 1.4rem; } '
    ".st-key-condition, .st-key-facts { margin-top: -.55rem; } "
    '[data-testid="stColumn"]:has(> div > .st-key-bench_cell) { align-self: stretch; } '
    ".st-key-bench_cell { position: sticky; top: 4rem; } "
    ".st-key-player_store { position: absolute; } "
    ".st-key-verdict { padding: .5rem .9rem; } .st-key-verdict p { font-size: .88rem; line-height: 1.4; } "
    ".st-key-hold_result { margin: -.6rem 0; } "
    ".st-key-hold_result p { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; } "
    f"{chart.STYLE}</style>"
    # This loads the font of code with the menu. If a font loads later, Plotly draws every chart again.
    '<span aria-hidden="true" style="position: absolute; visibility: hidden; font-family: \'Source Code Pro\'">0</span>'
)
_ENTERED = "kvlens_entered"


def navigation() -> Page:
    """The menu; returns the page that was asked for. Every file stem equals its url_path (see `enter`).
    A session that may not look at the dashboard ends here, before anything is drawn."""
    refuse_session()
    st.session_state[_ENTERED] = True
    return st.navigation(
        [
            st.Page("pages/home.py", title="Runs", default=True),
            st.Page("pages/run.py", title="New run", url_path="run"),
            st.Page("pages/study.py", title="Study", url_path="study"),
            st.Page("pages/replay.py", title="Replay", url_path="replay"),
            st.Page("pages/heads.py", title="Heads", url_path="heads"),
            st.Page("pages/spans.py", title="Spans", url_path="spans"),
            st.Page("pages/method.py", title="Method", url_path="method"),
            st.Page("pages/memory.py", title="Memory", url_path="memory"),
            st.Page("pages/compare.py", title="Compare", url_path="compare"),
            st.Page("pages/benchmarks.py", title="Benchmarks", url_path="benchmarks"),
            st.Page("pages/own_method.py", title="Own method", url_path="own_method"),
        ],
        position="top",
    )


def enter() -> None:
    """First line of every page. A deep link that is a fresh server's first visit makes Streamlit 1.67 run the file in
    pages/ alone, without app.py, because no session has announced a menu yet: announce it and start over."""
    session.set_condition("")
    if _ENTERED not in st.session_state:
        navigation()
        st.rerun()
