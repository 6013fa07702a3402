"""Stored races in a list, and how one came out, in words."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import data, widgets
from kvlens.budget import in_words, phrase
from kvlens.methods.naming import titled
from kvlens.models.find import short_model
from kvlens.runs import races
from kvlens.runs.races import Lane, RaceInfo
from kvlens.store.reader import TraceError
from kvlens.text.plaintext import visible
from kvlens.text.units import counted

NEWEST = 12
"""stored races that are listed at first"""


def race_list(shown: str | None = None) -> None:
    """All stored races but the one that is shown, newest first, each a link; nothing where there is none."""
    folder = data.runs_dir()
    rows = [race_id for race_id in races.ids(folder) if race_id != shown]
    if not rows:
        return
    with st.expander(f"Stored races ({len(rows)})", icon=":material/sports_score:"):
        every = len(rows) <= NEWEST or st.toggle("Show all of them", key="races_every", persist_state="session")
        for race_id in rows[: None if every else NEWEST]:
            try:
                race = races.read(folder, race_id)
            except TraceError as problem:
                widgets.error(str(problem))
                continue
            limit = phrase(in_words(race.budget))
            sentence = f"{race.created[:16].replace('T', ' ')} UTC · {short_model(race.model)} · {limit}"
            st.page_link("pages/run.py", label=widgets.plain(visible(sentence)), query_params={"race": race_id})
            st.caption(widgets.plain(f"{_entered(race)} {finding(race)}"))


def lane_name(lane: Lane) -> str:
    """Return what a lane's method is called, its untrained parts included, and what tells it from another lane of its
    method."""
    return f"{titled(data.method_title(lane.method), lane.stand_in)} {lane.differs}".strip()


def _entered(race: RaceInfo) -> str:
    names = list(map(lane_name, race.lanes[1:]))
    return f"{counted(len(names), _unit(race))}: {', '.join(names)}."


def _unit(race: RaceInfo) -> str:
    """Return what the lanes are counted as: methods, or lanes where two have one method."""
    names = [lane.method for lane in race.lanes]
    return "method" if len(set(names)) == len(names) else "lane"


def finding(race: RaceInfo) -> str:
    """Who left full KV, and who answered right."""
    ran = [lane for lane in race.lanes[1:] if lane.state in ("completed", "cancelled")]
    remaining = [f"{lane_name(lane)} at step {lane.lost}" for lane in ran if lane.lost is not None]
    sentence = (
        f"{len(remaining)} of {counted(len(ran), _unit(race))} left full KV: {', '.join(remaining)}."
        if remaining
        else f"No {_unit(race)} left full KV."
    )
    if not ran:
        sentence = f"No {_unit(race)} ran to its end."
    right = [lane_name(lane) for lane in race.lanes if lane.right]
    if race.answer:
        sentence += f" Right answer: {', '.join(right) or 'none'}."
    return sentence
