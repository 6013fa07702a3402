"""Replay: play a run token by token; above the player what it lost and why, below it what the selected head read and
what moved."""

import streamlit as st

from kvlens.app.ui.common import nav, session
from kvlens.app.ui.common.again import again_link
from kvlens.app.ui.common.comparing import links as compare_links
from kvlens.app.ui.common.data import fit, open_run, player_payloads
from kvlens.app.ui.common.effectplace import follow_effects
from kvlens.app.ui.common.frame import choose_run
from kvlens.app.ui.common.ledgerview import run_ledger
from kvlens.app.ui.common.lensdata import of_this_run
from kvlens.app.ui.common.player import KEY, committed, player
from kvlens.app.ui.common.reportbutton import replay_button, report_button
from kvlens.app.ui.common.state import from_player
from kvlens.app.ui.common.widgets import guarded
from kvlens.app.ui.replay import details, draft, lensbars, lensview

nav.enter()


def on_commit() -> None:
    """The player moved: the tables and the URL follow, the player itself needs no answer."""
    session.change(from_player(committed()), moved_by_python=False)


@st.fragment
@guarded
def body() -> None:
    """Verdict, player and tables; a commit runs this part of the page only."""
    reader = open_run(str(session.selection()[0].run))
    chosen, _ = fit(reader, follow_effects(reader, session.selection()[0]))
    session.store(chosen)
    lensview.panel(reader, chosen)
    player(*player_payloads(reader, chosen, session.revision()), on_commit)
    details.player_menu(reader, chosen, KEY)
    lensview.below(reader, chosen)
    with st.expander("Tables of this step: what was wanted, attended, moved and decided"):
        left, right = st.columns([11, 9], gap="medium")
        with left:
            lensbars.draw_reference_bars(reader, chosen)
            details.attended(reader, chosen)
        with right:
            details.decided(reader, chosen)
    session.write_url({**of_this_run(reader.uid), **draft.query(reader.uid)})


there = draft.in_url()
found = choose_run("Replay")
if found is not None:
    draft.enter(there, found[0].uid)
    details.facts(found[0])
    lensview.banner(found[0])
    body()
    run_ledger(found[0])
    details.conditions(found[0])
    with st.container(horizontal=True, vertical_alignment="center"):
        report_button(found[0], width="content")
        replay_button(found[0])
        compare_links(found[0].uid)
        again_link(found[0].uid)
