"""kvlens: navigation and theme; the pages are in pages/, what they are made of in kvlens/app/ui and kvlens/app/figures.

`streamlit run app.py` reads this file twice: once as the server, which has a door, and for every visitor as the script.
"""

from starlette.middleware import Middleware
from streamlit.starlette import App

from kvlens.app.ui.common.door import Door
from kvlens.app.ui.common.history import History
from kvlens.app.ui.common.startline import announced, refuse_start

if __name__ == "__main__":
    import streamlit as st

    from kvlens.app.ui.common.collector import COLLECTOR
    from kvlens.app.ui.common.nav import ICON, STYLE, navigation
    from kvlens.app.ui.common.widgets import guarded

    st.set_page_config(page_title="kvlens", page_icon=ICON, layout="wide")
    page = navigation()
    st.html(STYLE)
    st.logo(ICON, size="medium")
    try:
        guarded(page.run)()
    finally:
        COLLECTOR.freeze_imports()
else:
    refuse_start()
    app = App(__file__, lifespan=announced, middleware=[Middleware(Door), Middleware(History)])
