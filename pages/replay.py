"""Replay: play a run token by token; below the player, what the selected head read, what moved and what was decided at the step."""

import streamlit as st

from kvlens.ui import details, nav, session
from kvlens.ui.data import player_payloads
from kvlens.ui.frame import choose_run
from kvlens.ui.player import committed, player
from kvlens.ui.state import from_player

nav.enter()


def on_commit() -> None:
    session.change(from_player(committed()), moved_by_python=False)


@st.fragment
def body() -> None:
    from kvlens.ui.data import fit, open_run

    chosen, _ = session.selection()
    reader = open_run(str(chosen.run))
    chosen, _ = fit(reader, chosen)
    session.store(chosen)
    run, head = player_payloads(reader, chosen, session.revision())
    player(run, head, on_commit)
    details.step_details(reader, chosen)
    session.write_url()


found = choose_run("Replay")
if found is not None:
    details.facts(found[0])
    session.write_url()
    body()
