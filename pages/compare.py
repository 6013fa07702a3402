"""Compare: two runs on one cursor, what is set differently, what it did and what it cost; all runs as quality against
cost."""

import streamlit as st

from kvlens.ui.common import nav, session, widgets
from kvlens.ui.common.state import from_player
from kvlens.ui.compare import groups as comparegroups
from kvlens.ui.compare import pick as comparepick
from kvlens.ui.compare import view as compareview
from kvlens.ui.compare.player import committed

nav.enter()


def on_commit() -> None:
    """The view moved: the maps, curves and the URL follow, the view itself needs no answer."""
    session.change(from_player(committed()), moved_by_python=False)


@st.fragment
@widgets.guarded
def body() -> None:
    """What follows the cursor; a commit runs this part of the page only."""
    pair = comparepick.current()
    chosen, problems = compareview.fit(pair, session.selection()[0])
    session.store(chosen)
    widgets.notice(problems)
    compareview.metric_picker(pair, chosen)
    compareview.player(pair, chosen, on_commit)
    compareview.maps(pair, chosen)
    compareview.curves(pair, chosen)
    session.write_url(comparepick.url(pair))


st.subheader("Compare")
found = comparepick.choose_pair()
if found is not None:
    compareview.names(found)
    if found.apart is None:
        body()
    else:
        session.write_url(comparepick.url(found))
    left, right = st.columns([11, 9], gap="large")
    with left:
        compareview.deltas(found)
    with right:
        compareview.differences(found)
comparegroups.quality()
