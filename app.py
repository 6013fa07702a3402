"""kvlens: navigation and theme; the pages are in pages/, what they are made of in kvlens/ui and kvlens/figures."""

import streamlit as st

from kvlens.ui.common.nav import ICON, STYLE, navigation
from kvlens.ui.common.widgets import guarded

st.set_page_config(page_title="kvlens", page_icon=ICON, layout="wide")
st.html(STYLE)
st.logo(ICON, size="medium")
guarded(navigation().run)()
