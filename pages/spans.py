"""Spans: how the text was cut and why, how other segmenters would cut it, and how the keys of the spans lie to each
other."""

import streamlit as st

from kvlens.app.ui.common import nav, session
from kvlens.app.ui.common.frame import choose_run
from kvlens.app.ui.spans import fair as spansfair
from kvlens.app.ui.spans import map as spansmap
from kvlens.app.ui.spans import readers as spanreaders
from kvlens.app.ui.spans import segments as spansegments
from kvlens.app.ui.spans import table as spanstable
from kvlens.app.ui.spans import view as spansview

nav.enter()
found = choose_run("Spans")
if found is not None:
    reader, chosen = found
    view = spansview.controls(reader, chosen)
    query = {} if view.column == "mass" else {"color": view.column}
    query |= spansview.boundaries(reader, view)
    spansegments.segments(reader)
    spansfair.fair_shares(reader)
    spanstable.table(reader, view)
    left, right = st.columns([7, 5], gap="medium")
    with left:
        query |= spansmap.key_map(reader, view)
    with right:
        spanstable.selected(reader, view)
        spanstable.lengths(reader, view)
    spanreaders.who_reads(reader, chosen)
    session.write_url(query)
