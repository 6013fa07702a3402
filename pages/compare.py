"""Compare: any number of runs beside each other, answers and verdicts first; what is set differently; two of them on
one cursor; a map each; what each came to. All stored runs as quality against cost."""

import streamlit as st

from kvlens.app.ui.common import nav, session, widgets
from kvlens.app.ui.common.ledgerview import beside_ledgers
from kvlens.app.ui.common.state import from_player
from kvlens.app.ui.compare import lead, maps, pick, requested_runs, tables, view
from kvlens.app.ui.compare.groups import quality
from kvlens.app.ui.compare.player import committed

nav.enter()


def on_commit() -> None:
    """The view moved: the maps, curves and the URL follow, the view itself needs no answer."""
    session.change(from_player(committed()), moved_by_python=False)


@st.fragment
@widgets.guarded
def body() -> None:
    """What follows the cursor; a commit runs this part of the page only."""
    compared = pick.current()
    if compared is None:
        return
    pair, beside = compared.pair(), maps.together(compared)
    choice, problems = view.fit(pair, session.selection()[0])
    session.store(choice)
    widgets.notice(problems)
    view.head(compared, pair, choice, pair.apart is None or len(beside.names) > 1)
    if pair.apart is None:
        view.player(compared, pair, choice, on_commit)
    maps.maps(compared, pair, beside, choice)
    maps.curves(compared, beside, choice)
    session.write_url(requested_runs.address(compared.comparison))


st.subheader("Compare")
found = pick.choose()
if found is not None:
    lead.of_race(found.comparison.race)
    lead.side_by_side(found)
    lead.apart(found.pair(), maps.together(found))
    tables.differences(found)
    pick.pair_picker(found)
    body()
    tables.sums(found)
    beside_ledgers(found.runs)
quality()
