"""The comparison that a session has in hand, and links that begin one or add a run to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import streamlit as st

from kvlens.app.ui.common import data
from kvlens.app.ui.common.state import Selection
from kvlens.runs import races

PAGE = "pages/compare.py"
MOST = races.MOST + 1
"""runs in a comparison: a race of as many methods as there may be, and full KV"""
_KEPT = "kvlens_comparison"


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other. The run in focus, B, is the selection's."""

    runs: tuple[str, ...] = ()
    """uids, no one twice"""
    against: str | None = None
    """A, which the run in focus is laid over; None: the page's choice"""
    race: str | None = None
    """the race whose lanes the runs are"""

    def address(self) -> dict[str, str]:
        """The parts of the page's URL that say what is compared."""
        results = {"race": self.race} if self.race else {"runs": ",".join(self.runs)}
        return results | ({"against": self.against} if self.against else {})


def read_comparison() -> Comparison | None:
    """What the Compare page showed last in this session."""
    comparison: Comparison | None = st.session_state.get(_KEPT)
    return comparison


def _runs() -> tuple[str, ...]:
    results = read_comparison()
    return results.runs if results else ()


def keep(comparison: Comparison) -> None:
    """Makes it the one in hand."""
    st.session_state[_KEPT] = comparison


def with_runs(first_uid: str, more_uids: Iterable[str]) -> Comparison:
    """A run beside others: the comparison in hand with those that it lacks, where the run is in it and there is room;
    else these runs alone."""
    target = tuple(dict.fromkeys((first_uid, *more_uids)))
    runs = tuple(dict.fromkeys((*_runs(), *target)))
    return Comparison(runs if first_uid in _runs() and len(runs) <= MOST else target)


def link(
    first_uid: str, *more_uids: str, against: str | None = None, selection: Selection | None = None
) -> dict[str, str]:
    """URL parameters of the Compare page for a run beside others, see `with_runs`; the last one is in focus. against:
    what it is laid over, the page's choice unless given; selection: the place to look at."""
    place = (selection or Selection()).merged({"run": more_uids[-1] if more_uids else first_uid, "span": None})
    return place.query() | Comparison(with_runs(first_uid, more_uids).runs, against).address()


def at_all_steps(uid: str, repeat: str) -> dict[str, str]:
    """URL parameters of the Compare page for a run, its forced repeat and the full KV whose tokens that was fed."""
    table = data.runs_lately()
    rows = table.loc[(table["uid"] == repeat) & table["reference"].isin(table["uid"]), "reference"]
    return link(uid, *map(str, rows), repeat)


def links(uid: str) -> None:
    """Ways to the Compare page: the run and its partner, and the comparison in hand with the run in it."""
    st.page_link(PAGE, label="Compare with another run", icon=":material/compare:", query_params={"run": uid})
    runs = _runs()
    if len(runs) > 1 and uid not in runs and len(runs) < MOST:
        joined = {"run": uid} | Comparison((*runs, uid)).address()
        label = f"Add to the comparison of {len(runs)} runs"
        st.page_link(PAGE, label=label, icon=":material/add:", query_params=joined)


def compare_link(uids: Sequence[str]) -> None:
    """A link to the Compare page with these runs alone, the first MOST; nothing for fewer than two."""
    if len(uids) < 2:
        return
    label = "Compare" if len(uids) <= MOST else f"Compare the first {MOST}"
    address = Comparison(tuple(uids[:MOST])).address()
    st.page_link(PAGE, label=label, icon=":material/compare:", query_params=address)
