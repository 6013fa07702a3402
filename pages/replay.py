"""Replay: play a run token by token; below the player, what the selected head read, what moved and what was decided at the step."""

import streamlit as st

from kvlens.ui import details, nav, session
from kvlens.ui.data import fit, open_run, player_payloads
from kvlens.ui.frame import choose_run
from kvlens.ui.player import committed, player
from kvlens.ui.state import from_player
from kvlens.ui.widgets import guarded

nav.enter()


def on_commit() -> None:
    """The player moved: the tables and the URL follow, the player itself needs no answer."""
    session.change(from_player(committed()), moved_by_python=False)


@st.fragment
@guarded
def body() -> None:
    """Player and tables; a commit runs this part of the page only."""
    reader = open_run(str(session.selection()[0].run))
    chosen, _ = fit(reader, session.selection()[0])
    session.store(chosen)
    player(*player_payloads(reader, chosen, session.revision()), on_commit)
    details.step_details(reader, chosen)
    session.write_url()


found = choose_run("Replay")
if found is not None:
    details.facts(found[0])
    body()
