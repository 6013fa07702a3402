"""Where a link leads: the whole place in a run that the page would come to by itself.

A page writes its selection into the address. Where the link says less than that, Streamlit 1.67 adds an entry to the
browser's history for it, and Back only leads to the address that the page replaces again; a link that says all of it
leaves the history as it is."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from kvlens.app.ui.common import data
from kvlens.app.ui.common.data import TraceError, TraceReader
from kvlens.app.ui.common.effectplace import remember_opening
from kvlens.app.ui.common.state import Selection
from kvlens.store.amend import PENDING


def in_run(uid: str, view: Selection | None = None) -> dict[str, str]:
    """URL parameters of a link to a run: the place `view`, brought inside the run as a page does; None: where the run
    opens.

    Of a run that cannot be opened, its uid alone: the page then says why."""
    place, awaits_effects = _in_run(
        str(data.runs_dir()), uid, data.stamp(uid), (view or Selection()).merged({"run": uid})
    )
    if view is None and awaits_effects:
        remember_opening(uid, place)
    return place.query()


@st.cache_data(max_entries=256, show_spinner=False)
def _in_run(folder: str, uid: str, changed: int, selection: Selection) -> tuple[Selection, bool]:
    """The place, and whether the run's effects are not stored yet."""
    try:
        with TraceReader.open(Path(folder), uid) as reader:
            return data.fit(reader, selection)[0], reader.meta.no_effects == PENDING
    except TraceError:
        return Selection(run=uid), False
