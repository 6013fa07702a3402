"""Heads: one metric over layers and query heads, the selected head over steps, and the table of all heads for
download."""

from kvlens.app.ui.common import nav, session
from kvlens.app.ui.common.frame import choose_run
from kvlens.app.ui.heads import retrieval
from kvlens.app.ui.heads import view as headview

nav.enter()
found = choose_run("Heads")
if found is not None:
    reader, chosen = found
    view = headview.controls(reader, chosen)
    if view is not None:
        headview.figures(reader, view)
        headview.table(reader, view)
        retrieval.over_runs(reader, view.cell)
        session.write_url(view.query())
